// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_TRT_DEFINITION_H_
#define STOF_PLUGINS_TRT_DEFINITION_H_

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/trt/fields.h"

namespace stof::trt {

inline constexpr char kNamespace[] = "stof";
inline constexpr char kVersion[] = "1";
inline constexpr int kMostInputs = 32;
inline constexpr int kMostOutputs = 8;

// The immutable part of a plugin. Clones share it: Op::Run may run on several threads.
class Definition {
 public:
  // layer: for messages. deserialized: the fields come from an engine file, not from an ONNX node.
  static Status Make(const OpDescription& description, const std::string& layer, const Fields& fields,
                     bool deserialized, std::shared_ptr<const Definition>* definition);
  Definition(const Definition&) = delete;
  Definition& operator=(const Definition&) = delete;

  const OpDescription& description() const { return description_; }
  const std::string& layer() const { return layer_; }
  const Fields& fields() const { return fields_; }
  const Op& op() const { return *op_; }
  int inputs() const { return op_->InputCount(); }
  int outputs() const { return results() + spare_outputs_; }
  // The outputs that are written; spare outputs of one element follow.
  int results() const { return op_->OutputCount(); }
  // The type of a variadic operator's output, which its attributes give.
  DType output_type(int index) const {
    return index < results() ? description_.output_type(fields_, index) : DType::kF32;
  }
  // The contents of an engine file: Make gives an equal definition from them.
  const nvinfer1::PluginFieldCollection* serialized() const { return &collection_; }
  // A hash of attributes, constants and kernels.
  const char* timing_id() const { return timing_id_.c_str(); }
  const char* metadata() const { return metadata_.c_str(); }

 private:
  Definition(const OpDescription& description, std::string layer)
      : description_(description), layer_(std::move(layer)) {}
  Status Prepare(const Fields& given);
  void Serialize();
  void Describe();

  const OpDescription& description_;
  const std::string layer_;
  Fields fields_;  // declared attributes and constants
  std::unique_ptr<Op> op_;
  int spare_outputs_ = 0;
  std::vector<int32_t> ints_;
  std::vector<nvinfer1::PluginField> serialized_;
  nvinfer1::PluginFieldCollection collection_;
  std::string timing_id_, metadata_;
};

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_DEFINITION_H_
