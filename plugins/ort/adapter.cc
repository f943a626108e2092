// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/adapter.h"

#include "plugins/ort/kernel.h"
#include "plugins/ort/shape_inference.h"

namespace stof::ort {

void Fill(const OrtApi* api, const OpDescription& description, DType type, DType storage, const char* provider,
          Registration* registration) {
  Registration& r = *registration;
  static_cast<OrtCustomOp&>(r) = OrtCustomOp{};
  r.description = &description;
  r.type = type;
  r.storage = storage;
  r.provider = provider;
  r.api = api;
  r.version = kApiVersion;
  r.GetName = [](const OrtCustomOp* op) { return Self(op).description->name; };
  r.GetExecutionProviderType = [](const OrtCustomOp* op) { return Self(op).provider; };
  r.GetInputTypeCount = [](const OrtCustomOp* op) -> size_t {
    if (Self(op).description->is_variadic) return 1;
    return Self(op).description->FirstInputs() + Self(op).description->optional_inputs;
  };
  r.GetInputType = [](const OrtCustomOp* op, size_t i) {
    const OpDescription& description = *Self(op).description;
    if (i < static_cast<size_t>(description.typed_inputs)) return static_cast<ONNXTensorElementDataType>(Self(op).type);
    if ((description.storage_inputs >> i & 1u) != 0) return static_cast<ONNXTensorElementDataType>(Self(op).storage);
    return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  };
  r.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    if (Self(op).description->is_variadic) return INPUT_OUTPUT_VARIADIC;
    return i < static_cast<size_t>(Self(op).description->FirstInputs()) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  r.GetInputMemoryType = [](const OrtCustomOp* op, size_t i) {
    return (Self(op).description->host_inputs >> i & 1u) != 0 ? OrtMemTypeCPUInput : OrtMemTypeDefault;
  };
  r.GetOutputTypeCount = [](const OrtCustomOp* op) -> size_t {
    const OpDescription& description = *Self(op).description;
    return description.is_variadic ? 1 : description.outputs + description.optional_outputs;
  };
  r.GetOutputType = [](const OrtCustomOp* op, size_t i) {
    const Registration& self = Self(op);
    return static_cast<ONNXTensorElementDataType>(
        self.description->OutputType(static_cast<int>(i), self.type, self.storage));
  };
  r.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) {
    const OpDescription& description = *Self(op).description;
    if (description.is_variadic) return INPUT_OUTPUT_VARIADIC;
    return i < static_cast<size_t>(description.outputs) ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  };
  r.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicInputHomogeneity = [](const OrtCustomOp* op) { return Self(op).description->is_variadic ? 0 : 1; };
  r.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  r.GetVariadicOutputHomogeneity = [](const OrtCustomOp* op) { return Self(op).description->is_variadic ? 0 : 1; };
  r.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  r.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  r.CreateKernelV2 = CreateKernel;
  r.KernelComputeV2 = Compute;
  r.KernelDestroy = DestroyKernel;
  // ONNX Runtime up to 1.23 ends the process in it where an input is left out.
  if (description.shape_rule != nullptr) r.InferOutputShapeFn = InferShapes;
}

}  // namespace stof::ort
