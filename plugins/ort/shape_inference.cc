// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/shape_inference.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <vector>

#include "plugins/core/contract/dim_rule.h"
#include "plugins/ort/adapter.h"
#include "plugins/ort/attributes.h"
#include "plugins/ort/errors.h"

namespace stof::ort {
namespace {

using ShapeInfo = std::unique_ptr<OrtTensorTypeAndShapeInfo, void (*)(OrtTensorTypeAndShapeInfo*)>;

// Copies symbols as well as sizes, so that users keep seeing "batch" and "sequence" on the outputs.
OrtStatus* InferOne(const Registration& self, OrtShapeInferContext* context, const InferAttributes& attributes,
                    const std::vector<OrtTensorTypeAndShapeInfo*>& inputs, const std::vector<int>& ranks, int index) {
  const OrtApi* api = self.api;
  const auto rules = self.description->shape_rule(attributes, ranks.data(), static_cast<int>(ranks.size()), index);
  if (rules.empty()) return nullptr;
  std::vector<std::vector<int64_t>> dims(inputs.size());
  for (const DimRule& rule : rules) {
    for (const int input : {rule.input, rule.by_input}) {
      if (input < 0 || !dims[input].empty()) continue;
      dims[input].resize(static_cast<size_t>(ranks[input]));
      STOF_ORT_RETURN(api->GetDimensions(inputs[input], dims[input].data(), dims[input].size()));
    }
  }
  std::vector<int64_t> sizes(rules.size(), -1);
  std::vector<const char*> symbols(rules.size(), "");
  for (size_t i = 0; i < rules.size(); ++i) {
    sizes[i] = rules[i].value;
    if (rules[i].input < 0) continue;
    const auto rank = static_cast<size_t>(ranks[rules[i].input]);
    std::vector<const char*> names(rank, "");
    STOF_ORT_RETURN(api->GetSymbolicDimensions(inputs[rules[i].input], names.data(), rank));
    // A model may claim any size; one that overflows is unknown, and refused when the node runs.
    sizes[i] = EvaluateRule(rules[i], [&](int input, int axis) { return dims[input][axis]; });
    const bool scaled = rules[i].times != rules[i].over || rules[i].by_input >= 0;
    const bool known = dims[rules[i].input][rules[i].axis] >= 0;
    if (!known && !scaled && names[rules[i].axis] != nullptr) symbols[i] = names[rules[i].axis];
  }
  // ONNX Runtime takes a dimension of -1 without a symbol for a size, so an unknown one leaves the whole shape open.
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] < 0 && (symbols[i] == nullptr || symbols[i][0] == '\0')) return nullptr;
  }
  OrtTensorTypeAndShapeInfo* raw = nullptr;
  STOF_ORT_RETURN(api->CreateTensorTypeAndShapeInfo(&raw));
  const ShapeInfo shape(raw, api->ReleaseTensorTypeAndShapeInfo);
  STOF_ORT_RETURN(api->SetDimensions(raw, sizes.data(), sizes.size()));
  STOF_ORT_RETURN(api->SetSymbolicDimensions(raw, symbols.data(), symbols.size()));
  // Input 0's type, not this registration's: ONNX Runtime asks one registration for all types of the operator.
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (self.description->is_variadic) {
    type = static_cast<ONNXTensorElementDataType>(self.description->output_type(attributes, index));
  } else if (self.description->untyped_inputs > 0) {
    type = static_cast<ONNXTensorElementDataType>(self.description->types[0]);
  } else {
    STOF_ORT_RETURN(api->GetTensorElementType(inputs[0], &type));
    type = static_cast<ONNXTensorElementDataType>(self.description->OutputType(index, static_cast<DType>(type)));
  }
  STOF_ORT_RETURN(api->SetTensorElementType(raw, type));
  return api->ShapeInferContext_SetOutputTypeShape(context, static_cast<size_t>(index), raw);
}

OrtStatus* InferLists(const Registration& self, OrtShapeInferContext* context, const InferAttributes& attributes) {
  const OrtApi* api = self.api;
  size_t count = 0;
  STOF_ORT_RETURN(api->ShapeInferContext_GetInputCount(context, &count));
  std::vector<OrtTensorTypeAndShapeInfo*> inputs(std::min<size_t>(count, kMaxInputs), nullptr);
  std::vector<int> ranks(inputs.size(), -1);
  for (size_t i = 0; i < inputs.size(); ++i) {
    size_t rank = 0;
    if (HasFailed(api, api->ShapeInferContext_GetInputTypeShape(context, i, &inputs[i])) || inputs[i] == nullptr ||
        HasFailed(api, api->GetDimensionsCount(inputs[i], &rank))) {
      continue;
    }
    ranks[i] = static_cast<int>(rank);
  }
  // The first output alone. A node may have fewer outputs than the description, the API does not give their number, and
  // ONNX Runtime up to 1.23 ends the process when it gets the shape of one that a node does not have. The others'
  // shapes come from the model's value_info.
  const DType type = self.description->output_type(attributes, 0);
  // On the CPU the runtime may turn an fp16 node into one of fp32, and refuses it when we say fp16 then; a shape
  // without a type cannot be given. So these types come from the model's value_info, too.
  if (type == DType::kUndefined || type == DType::kF16) return nullptr;
  (void)HasFailed(api, InferOne(self, context, attributes, inputs, ranks, 0));
  return nullptr;
}

}  // namespace

OrtStatus* ORT_API_CALL InferShapes(const OrtCustomOp* op, OrtShapeInferContext* context) {
  const Registration& self = Self(op);
  try {
    const InferAttributes attributes(self.api, context);
    if (self.description->is_variadic) return InferLists(self, context, attributes);
    std::vector<OrtTensorTypeAndShapeInfo*> inputs(self.description->FirstInputs(), nullptr);
    std::vector<int> ranks(inputs.size(), 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      size_t rank = 0;
      // An input of unknown shape leaves the output's shape unknown; Run checks it anyway.
      if (HasFailed(self.api, self.api->ShapeInferContext_GetInputTypeShape(context, i, &inputs[i])) ||
          inputs[i] == nullptr || HasFailed(self.api, self.api->GetDimensionsCount(inputs[i], &rank)) || rank == 0) {
        return nullptr;
      }
      ranks[i] = static_cast<int>(rank);
    }
    // No shapes of optional outputs: the API does not say whether a node has them, and ONNX Runtime up to 1.23 ends the
    // process when it gets the shape of an output that a node does not have.
    for (int i = 0; i < self.description->outputs; ++i) {
      STOF_ORT_RETURN(InferOne(self, context, attributes, inputs, ranks, i));
    }
    return nullptr;
  } catch (const std::exception& error) {
    return self.api->CreateStatus(ORT_FAIL, error.what());
  }
}

}  // namespace stof::ort
