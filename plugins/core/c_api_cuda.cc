// SPDX-License-Identifier: Apache-2.0
// The operators on a CUDA device, without a runtime: tensors are device addresses, work is queued on the caller's
// stream.
#include "plugins/core/c_api_internal.h"
#include "plugins/core/cuda_backend.h"

namespace {

using stof::Status;

// Hands out pieces of the caller's workspace. There is nothing to give back: a piece lives as long as the workspace.
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
  return stof::Guarded(error, error_size, [&] {
    std::vector<stof::Tensor> in;
    STOF_RETURN_IF_ERROR(stof::Convert(inputs, input_count, &in));
    return op->op->Prepare(in.data(), input_count);
  });
}

int stof_op_run_cuda(stof_op* op, const stof_tensor* inputs, int input_count, stof_tensor* outputs, int output_count,
                     void* workspace, size_t workspace_size, void* stream, char* error, size_t error_size) {
  return stof::Guarded(error, error_size, [&] {
    if (stof::FindCudaBackend() == nullptr) return Status::Error("this build of the library has no CUDA kernels");
    std::vector<stof::Tensor> in;
    std::vector<stof::Tensor> out;
    STOF_RETURN_IF_ERROR(stof::Convert(inputs, input_count, &in));
    STOF_RETURN_IF_ERROR(stof::Convert(outputs, output_count, &out));
    Workspace space(workspace, workspace_size);
    stof::RunContext context;
    context.allocate = Workspace::Allocate;
    context.self = &space;
    context.on_cuda = true;
    context.stream = stream;
    return op->op->Run(in.data(), input_count, out.data(), output_count, context);
  });
}

int stof_cuda_kernel(int head_size, int bf16, int number, int32_t* rows, int32_t* keys, int32_t* workers) {
  const stof::CudaBackend* backend = stof::FindCudaBackend();
  return backend != nullptr && backend->kernel(head_size, bf16 != 0, number, rows, keys, workers) ? 0 : 1;
}

void stof_cuda_take_kernel(int number) {
  if (const stof::CudaBackend* backend = stof::FindCudaBackend()) backend->take_kernel(number);
}

}  // extern "C"
