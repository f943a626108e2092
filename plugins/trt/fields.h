// SPDX-License-Identifier: Apache-2.0
// Plugin fields: an ONNX node's attributes, or the contents of an engine file. Both are foreign data.
#ifndef STOF_PLUGINS_TRT_FIELDS_H_
#define STOF_PLUGINS_TRT_FIELDS_H_

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::trt {

struct Field {
  enum class Kind : uint8_t { kInt, kFloat, kString, kInts, kOther };
  std::string name;
  Kind kind = Kind::kOther;
  int64_t i = 0;
  float f = 0;
  std::string s;
  std::vector<int32_t> numbers;  // of kInts: more than one
};

// Copies of fields, sorted by name.
class Fields final : public AttributeReader {
 public:
  // Null pointers, negative or absurd lengths, names that come twice and strings with a NUL inside are errors.
  static Status Read(const nvinfer1::PluginFieldCollection* collection, Fields* fields);

  bool Int(const char* name, int64_t* value) const override;
  bool Float(const char* name, float* value) const override;
  bool String(const char* name, std::string* value) const override;
  bool Ints(const char* name, std::vector<int64_t>* value) const override;
  const Field* Find(const char* name) const;
  void Set(Field field);
  void Remove(const char* name);
  const std::vector<Field>& all() const { return fields_; }

 private:
  std::vector<Field> fields_;
};

// The field that holds constant inputs.
inline constexpr char kConstants[] = "constants";
// How many outputs a node of a variadic operator has beside its own: TensorRT's parser wants as many outputs of a node
// as its function or its plugin has. Nobody reads them.
inline constexpr char kSpareOutputs[] = "spare_outputs";

// Constant inputs as text, for tensors that an operator must know when it is prepared (the tables of a mask) and whose
// data TensorRT does not show to plugins: entries "INPUT TYPE SHAPE DATA", joined by ";". INPUT is the index of the
// input; TYPE is bool, uint8, int32 or int64; SHAPE the dimensions, joined by "x"; DATA the elements, row-major,
// little-endian, in base64 (RFC 4648, padded). Booleans are packed, element i in bit i % 8 of byte i / 8.
// tensors: [count], of which those with an entry get type, shape and data, which `data` [count] holds.
Status ParseConstants(const std::string& text, int count, Tensor* tensors, std::vector<char>* data);

}  // namespace stof::trt
#endif  // STOF_PLUGINS_TRT_FIELDS_H_
