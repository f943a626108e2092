// SPDX-License-Identifier: Apache-2.0
// The operators on a CUDA device, without a runtime: tensors are device addresses, work is queued on the caller's
// stream.
#include <algorithm>

#include "plugins/core/c_api/internal.h"
#include "plugins/core/contract/cuda_backend.h"

namespace {

using stof::Status;

// Allocates from the caller's workspace. Nothing is freed: a block lives as long as the workspace.
class Workspace {
 public:
  Workspace(void* data, size_t bytes) : next_(reinterpret_cast<uintptr_t>(data)), end_(next_ + bytes) {}
  static void* Allocate(void* self, size_t bytes) {
    auto& space = *static_cast<Workspace*>(self);
    const uintptr_t begin = (space.next_ + kAlignment - 1) / kAlignment * kAlignment;
    if (space.next_ == 0 || begin > space.end_ || space.end_ - begin < bytes) return nullptr;
    space.next_ = begin + bytes;
    return reinterpret_cast<void*>(begin);
  }

 private:
  static constexpr uintptr_t kAlignment = 256;
  uintptr_t next_, end_;
};

}  // namespace

extern "C" {

int stof_op_prepare(stof_op* op, const stof_tensor* inputs, int input_count, char* error, size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] {
    STOF_RETURN_IF_ERROR(stof::CheckGiven({{"op", op}}));
    std::vector<stof::Tensor> in;
    STOF_RETURN_IF_ERROR(stof::Convert(inputs, input_count, &in));
    return op->op->Prepare(in.data(), input_count);
  });
}

int stof_op_run_cuda(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs, int output_count,
                     void* workspace, size_t workspace_size, void* stream, char* error, size_t error_size) {
  Workspace space(workspace, workspace_size);
  return stof_op_run_cuda_allocating(op, inputs, input_count, outputs, output_count, Workspace::Allocate, &space,
                                     stream, error, error_size);
}

int stof_op_run_cuda_allocating(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs,
                                int output_count, stof_allocate allocate, void* allocate_context, void* stream,
                                char* error, size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] {
    if (stof::FindCudaBackend() == nullptr) return Status::Error(stof::kNoCudaKernels);
    STOF_RETURN_IF_ERROR(stof::CheckGiven({{"op", op}, {"allocate", reinterpret_cast<const void*>(allocate)}}));
    std::vector<stof::Tensor> in;
    std::vector<stof::Tensor> out;
    STOF_RETURN_IF_ERROR(stof::Convert(inputs, input_count, &in));
    STOF_RETURN_IF_ERROR(stof::Convert(outputs, output_count, &out));
    stof::RunContext context;
    context.allocate = allocate;
    context.self = allocate_context;
    context.on_cuda = true;
    context.stream = stream;
    return op->op->Run(in.data(), input_count, out.data(), output_count, context);
  });
}

int stof_cuda_device(char* name, size_t name_size, int32_t* capability, char* error, size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] {
    const stof::CudaBackend* backend = stof::FindCudaBackend();
    if (backend == nullptr) return Status::Error(stof::kNoCudaKernels);
    STOF_RETURN_IF_ERROR(stof::CheckGiven({{"capability", capability}}));
    std::string found;
    STOF_RETURN_IF_ERROR(backend->describe_device(&found, capability));
    if (name != nullptr && name_size > 0) std::snprintf(name, name_size, "%s", found.c_str());
    return Status();
  });
}

int stof_cuda_kernels(int64_t head_size, int32_t dtype, char* names, size_t names_size, char* error,
                      size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] {
    const stof::CudaBackend* backend = stof::FindCudaBackend();
    if (backend == nullptr) return Status::Error(stof::kNoCudaKernels);
    std::string found;
    STOF_RETURN_IF_ERROR(backend->attention.list_kernels(head_size, static_cast<stof::DType>(dtype), &found));
    STOF_RETURN_IF_ERROR(stof::CheckGiven({{"names", names}}));
    if (found.size() >= names_size) return Status::Error("the names take " + std::to_string(found.size()) + " bytes");
    std::copy(found.c_str(), found.c_str() + found.size() + 1, names);
    return Status();
  });
}

int stof_op_time_cuda(stof_op* op, const stof_tensor* inputs, int input_count, int output_count, double seconds,
                      double* microseconds, char* error, size_t error_size) {
  return stof::RunGuarded(error, error_size, [&] {
    const stof::CudaBackend* backend = stof::FindCudaBackend();
    if (backend == nullptr) return Status::Error(stof::kNoCudaKernels);
    if (output_count < 1 || output_count > 64) return Status::Error("a number of outputs that is not 1 to 64");
    STOF_RETURN_IF_ERROR(stof::CheckGiven({{"op", op}, {"microseconds", microseconds}}));
    std::vector<stof::Tensor> in;
    STOF_RETURN_IF_ERROR(stof::Convert(inputs, input_count, &in));
    return backend->time_op(*op->op, in.data(), input_count, output_count, seconds, microseconds);
  });
}

}  // extern "C"
