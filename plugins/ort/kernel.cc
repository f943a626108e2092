// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/kernel.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/host/quoted.h"
#include "plugins/ort/adapter.h"
#include "plugins/ort/attributes.h"
#include "plugins/ort/errors.h"
#include "plugins/ort/run_context.h"
#include "plugins/ort/tensors.h"

namespace stof::ort {
namespace {

constexpr int kMaxOutputs = 8;  // of a node

struct Kernel {
  Kernel() = default;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() {
    if (allocator != nullptr) api->ReleaseAllocator(allocator);
  }
  const OrtApi* api = nullptr;
  OrtAllocator* allocator = nullptr;  // of its provider, for CUDA
  bool on_cuda = false;
  std::string node;  // in messages
  std::unique_ptr<Op> op;
};

std::string NodeName(const OrtApi* api, const OrtKernelInfo* info) {
  size_t size = 0;
  if (HasFailed(api, api->KernelInfo_GetNodeName(info, nullptr, &size)) || size <= 1) return std::string();
  std::string name(size, '\0');
  if (HasFailed(api, api->KernelInfo_GetNodeName(info, name.data(), &size))) return std::string();
  name.resize(size - 1);
  return name;
}

// The node in messages: its operator, and its name as far as it fits.
std::string LabelOf(const char* op, const std::string& name) {
  return name.empty() ? op : std::string(op) + " " + Escape(name, 128, 64);
}

// Types and ranks are known at creation only for constants; everything else is checked in each Run.
OrtStatus* PrepareKernel(const OrtApi* api, const OrtKernelInfo* info, Kernel* kernel) {
  size_t count = 0;
  STOF_ORT_RETURN(api->KernelInfo_GetInputCount(info, &count));
  if (count > kMaxInputs) return TooMany(api, kernel->node, count, "inputs", kMaxInputs);
  std::vector<Tensor> inputs(count);
  std::vector<std::vector<char>> copies(count);
  for (size_t i = 0; i < count; ++i) {
    int constant = 0;
    const OrtValue* value = nullptr;
    if (HasFailed(api, api->KernelInfoGetConstantInput_tensor(info, i, &constant, &value)) || constant == 0) continue;
    STOF_ORT_RETURN(OfInput(api, kernel->node, i, FromValue(api, value, &inputs[i])));
    bool on_device = false;
    STOF_ORT_RETURN(OnDevice(api, value, &on_device));
    if (on_device) STOF_ORT_RETURN(ToOrt(api, kernel->node, ToHost(&inputs[i], &copies[i])));
  }
  return ToOrt(api, kernel->node, kernel->op->Prepare(inputs.data(), static_cast<int>(count)));
}

// Whether the calling thread's current device is that of the kernel's provider.
bool IsOnItsDevice(const OrtApi* api, const OrtAllocator* allocator) {
  const OrtMemoryInfo* memory = nullptr;
  int own = -1, current = -2;
  return allocator != nullptr && !HasFailed(api, api->AllocatorGetInfo(allocator, &memory)) &&
         !HasFailed(api, api->MemoryInfoGetId(memory, &own)) && FindCudaBackend()->current_device(&current).ok() &&
         own == current;
}

// Does ahead what the first run would do, as far as the model gives the shapes.
void PrepareFirstRun(const OrtApi* api, const OrtKernelInfo* info, Kernel* kernel) {
  size_t count = 0;
  if (HasFailed(api, api->KernelInfo_GetInputCount(info, &count)) || count > kMaxInputs) return;
  std::vector<Tensor> inputs(count);
  for (size_t i = 0; i < count; ++i) {
    OrtTypeInfo* type = nullptr;
    if (HasFailed(api, api->KernelInfo_GetInputTypeInfo(info, i, &type)) || type == nullptr)
      continue;  // an absent input
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    const bool described = !HasFailed(api, api->CastTypeInfoToTensorInfo(type, &tensor)) && tensor != nullptr &&
                           !HasFailed(api, Describe(api, tensor, &inputs[i]));
    api->ReleaseTypeInfo(type);
    if (!described) return;
  }
  if (kernel->on_cuda && !IsOnItsDevice(api, kernel->allocator)) return;
  // Errors, out of memory included, are left to the run.
  try {
    (void)kernel->op->PrepareNode(inputs.data(), static_cast<int>(count), kernel->on_cuda, RunThreads());
  } catch (const std::exception&) {
  }
}

// The types of the outputs by the model, or by the runtime that changed it.
OrtStatus* ReadOutputTypes(const OrtApi* api, const OrtKernelInfo* info, Op* op) {
  size_t count = 0;
  STOF_ORT_RETURN(api->KernelInfo_GetOutputCount(info, &count));
  DType types[kMaxOutputs] = {};
  for (size_t i = 0; i < std::min<size_t>(count, kMaxOutputs); ++i) {
    OrtTypeInfo* type = nullptr;
    if (HasFailed(api, api->KernelInfo_GetOutputTypeInfo(info, i, &type)) || type == nullptr) continue;
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    ONNXTensorElementDataType element = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
    if (!HasFailed(api, api->CastTypeInfoToTensorInfo(type, &tensor)) && tensor != nullptr &&
        !HasFailed(api, api->GetTensorElementType(tensor, &element))) {
      types[i] = static_cast<DType>(element);
    }
    api->ReleaseTypeInfo(type);
  }
  op->SetOutputTypes(types, static_cast<int>(std::min<size_t>(count, kMaxOutputs)));
  return nullptr;
}

OrtStatus* ComputeChecked(const Kernel& kernel, OrtKernelContext* context) {
  const OrtApi* api = kernel.api;
  size_t input_count = 0;
  size_t output_count = 0;
  STOF_ORT_RETURN(api->KernelContext_GetInputCount(context, &input_count));
  STOF_ORT_RETURN(api->KernelContext_GetOutputCount(context, &output_count));
  if (input_count > kMaxInputs) return TooMany(api, kernel.node, input_count, "inputs", kMaxInputs);
  if (output_count > kMaxOutputs) return TooMany(api, kernel.node, output_count, "outputs", kMaxOutputs);
  Tensor inputs[kMaxInputs];
  Tensor outputs[kMaxOutputs];
  for (size_t i = 0; i < input_count; ++i) {
    const OrtValue* value = nullptr;
    STOF_ORT_RETURN(api->KernelContext_GetInput(context, i, &value));
    STOF_ORT_RETURN(OfInput(api, kernel.node, i, FromValue(api, value, &inputs[i])));
  }
  const int ni = static_cast<int>(input_count);
  const int no = static_cast<int>(output_count);
  STOF_ORT_RETURN(ToOrt(api, kernel.node, kernel.op->InferOutputs(inputs, ni, outputs, no)));
  for (size_t i = 0; i < output_count; ++i) {
    if (outputs[i].dtype == DType::kUndefined) continue;  // an output that the operator does not have
    OrtValue* value = nullptr;
    STOF_ORT_RETURN(api->KernelContext_GetOutput(context, i, outputs[i].dims, outputs[i].rank, &value));
    if (value == nullptr) continue;
    STOF_ORT_RETURN(api->GetTensorMutableData(value, &outputs[i].data));
  }
  Pool pool{api, context};
  RunScratch scratch(api, context, kernel.node, kernel.allocator);
  RunContext run;
  if (kernel.on_cuda) {
    run.on_cuda = true;
    STOF_ORT_RETURN(api->KernelContext_GetGPUComputeStream(context, &run.stream));
    scratch.UseDevice(run.stream);
  }
  run.parallel = {RunOnPool, &pool, RunThreads()};
  run.allocate = RunScratch::Allocate;
  run.self = &scratch;
  const Status status = kernel.op->Run(inputs, ni, outputs, no, run);
  // What the runtime says of its memory is the cause of what the operator says.
  if (OrtStatus* error = scratch.TakeStatus()) return error;
  STOF_ORT_RETURN(ToOrt(api, kernel.node, status));
  return std::exchange(pool.status, nullptr);
}

}  // namespace

OrtStatus* ORT_API_CALL CreateKernel(const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** out) {
  const Registration& self = Self(op);
  std::string node;
  try {
    node = self.description->name;
    auto kernel = std::make_unique<Kernel>();
    kernel->api = api;
    kernel->on_cuda = self.provider != nullptr;
    const std::string name = NodeName(api, info);
    node = LabelOf(self.description->name, name);
    kernel->node = node;
    // ONNX Runtime puts the unescaped name before each message of a run, and Python then drops the message.
    if (!IsUtf8(name)) {
      return Error(api, ORT_INVALID_ARGUMENT, node,
                   "the node's name is not UTF-8, which ONNX demands and messages need: rename the node");
    }
    STOF_ORT_RETURN(ToOrt(api, kernel->node, CreateOp(*self.description, KernelAttributes(api, info), &kernel->op)));
    if (self.description->is_variadic) STOF_ORT_RETURN(ReadOutputTypes(api, info, kernel->op.get()));
    STOF_ORT_RETURN(PrepareKernel(api, info, kernel.get()));
    if (kernel->on_cuda && HasFailed(api, api->KernelInfoGetAllocator(info, OrtMemTypeDefault, &kernel->allocator))) {
      kernel->allocator = nullptr;
    }
    PrepareFirstRun(api, info, kernel.get());
    *out = kernel.release();
    return nullptr;
  } catch (const std::exception& error) {
    return Error(api, ORT_FAIL, node, error.what());
  }
}

void ORT_API_CALL DestroyKernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

OrtStatus* ORT_API_CALL Compute(void* kernel, OrtKernelContext* context) {
  const auto& self = *static_cast<const Kernel*>(kernel);
  try {
    return ComputeChecked(self, context);
  } catch (const std::bad_alloc&) {
    return Error(self.api, ORT_FAIL, self.node, "out of memory");
  } catch (const std::exception& error) {
    return Error(self.api, ORT_FAIL, self.node, error.what());
  }
}

}  // namespace stof::ort
