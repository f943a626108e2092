// SPDX-License-Identifier: Apache-2.0
// What TensorRT does with a plugin, without TensorRT: fields as its parser and its engine files give them, an
// expression builder over plain numbers, tensor descriptions.
#ifndef STOF_TESTS_TRT_HARNESS_H_
#define STOF_TESTS_TRT_HARNESS_H_

#include <NvInferRuntime.h>

#include <cstring>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/check.h"

extern "C" nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) noexcept;

namespace stof::test {

using nvinfer1::DataType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

// A dimension that is a number; -1 stands for one that is not known.
class FakeDim final : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
 public:
  explicit FakeDim(int64_t value) : value_(value) { mImpl = this; }
  bool isConstant() const override { return value_ >= 0; }
  int64_t getConstantValue() const override { return value_; }
  bool isSizeTensor() const override { return false; }
  int64_t value() const { return value_; }

 private:
  int64_t value_;
};

class FakeBuilder final : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
 public:
  FakeBuilder() { mImpl = this; }
  const nvinfer1::IDimensionExpr* constant(int64_t value) override {
    dims_.emplace_back(value);
    return &dims_.back();
  }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation operation,
                                            const nvinfer1::IDimensionExpr& first,
                                            const nvinfer1::IDimensionExpr& second) override {
    const int64_t a = static_cast<const FakeDim&>(first).value(), b = static_cast<const FakeDim&>(second).value();
    switch (operation) {
      case nvinfer1::DimensionOperation::kPROD:
        return constant(a * b);
      case nvinfer1::DimensionOperation::kFLOOR_DIV:
        return b == 0 ? nullptr : constant(a / b);
      default:
        return nullptr;
    }
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }
  nvinfer1::DimsExprs Dims(const std::vector<int64_t>& dims) {
    nvinfer1::DimsExprs made = {};
    made.nbDims = static_cast<int32_t>(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) made.d[i] = constant(dims[i]);
    return made;
  }
  static std::vector<int64_t> Values(const nvinfer1::DimsExprs& dims) {
    std::vector<int64_t> values;
    for (int i = 0; i < dims.nbDims; ++i) values.push_back(static_cast<const FakeDim*>(dims.d[i])->value());
    return values;
  }

 private:
  std::deque<FakeDim> dims_;
};

// A node's attributes as the parser hands them over.
struct Attributes {
  std::map<std::string, int32_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  std::map<std::string, std::vector<int32_t>> lists;
};

// A collection that owns what it points to, at odd addresses where `odd`, as data in an engine file may be.
class OwnedFields {
 public:
  explicit OwnedFields(const Attributes& attributes) {
    for (const auto& [name, value] : attributes.ints) Add(name, PluginFieldType::kINT32, 1, &value, 4, false);
    for (const auto& [name, value] : attributes.lists) {
      Add(name, PluginFieldType::kINT32, static_cast<int32_t>(value.size()), value.data(), 4 * value.size(), false);
    }
    for (const auto& [name, value] : attributes.floats) Add(name, PluginFieldType::kFLOAT32, 1, &value, 4, false);
    for (const auto& [name, value] : attributes.strings) {
      Add(name, PluginFieldType::kCHAR, static_cast<int32_t>(value.size() + 1), value.c_str(), value.size() + 1, false);
    }
    Finish();
  }
  // A copy of a serialized collection.
  explicit OwnedFields(const nvinfer1::PluginFieldCollection& from) {
    for (int i = 0; i < from.nbFields; ++i) {
      const PluginField& field = from.fields[i];
      CHECK(field.name != nullptr && field.data != nullptr && field.length > 0);
      const bool text = field.type == PluginFieldType::kCHAR;
      CHECK(text || field.type == PluginFieldType::kINT32 ||
            (field.type == PluginFieldType::kFLOAT32 && field.length == 1));
      Add(field.name, field.type, field.length, field.data, static_cast<size_t>(field.length) * (text ? 1 : 4), true);
    }
    Finish();
  }
  OwnedFields(const OwnedFields&) = delete;
  OwnedFields& operator=(const OwnedFields&) = delete;
  nvinfer1::PluginFieldCollection* get() { return &collection_; }
  std::vector<PluginField>& fields() { return fields_; }
  void Finish() { collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()}; }
  void Add(const std::string& name, PluginFieldType type, int32_t length, const void* data, size_t bytes, bool odd) {
    names_.push_back(name);
    // Exactly as large as it is, so that a read beyond it shows under a sanitizer.
    data_.emplace_back(new char[bytes + (odd ? 1 : 0)]);
    char* at = data_.back().get() + (odd ? 1 : 0);
    if (bytes > 0) std::memcpy(at, data, bytes);
    fields_.emplace_back(names_.back().c_str(), at, type, length);
  }

 private:
  std::deque<std::string> names_;
  std::vector<std::unique_ptr<char[]>> data_;
  std::vector<PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_;
};

inline nvinfer1::IPluginCreatorV3One* FindCreator(const std::string& name) {
  int32_t count = 0;
  nvinfer1::IPluginCreatorInterface* const* creators = getCreators(count);
  for (int32_t i = 0; i < count; ++i) {
    auto* creator = static_cast<nvinfer1::IPluginCreatorV3One*>(creators[i]);
    if (creator->getPluginName() == name) return creator;
  }
  return nullptr;
}

// A plugin with its three sides.
struct Held {
  std::unique_ptr<nvinfer1::IPluginV3> plugin;
  nvinfer1::IPluginV3OneCore* core = nullptr;
  nvinfer1::IPluginV3OneBuildV2* build = nullptr;
  nvinfer1::IPluginV3OneRuntime* runtime = nullptr;
  explicit Held(nvinfer1::IPluginV3* made) : plugin(made) {
    if (made == nullptr) return;
    using nvinfer1::PluginCapabilityType;
    core = static_cast<nvinfer1::IPluginV3OneCore*>(made->getCapabilityInterface(PluginCapabilityType::kCORE));
    build = static_cast<nvinfer1::IPluginV3OneBuildV2*>(made->getCapabilityInterface(PluginCapabilityType::kBUILD));
    runtime = static_cast<nvinfer1::IPluginV3OneRuntime*>(made->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
  }
};

inline Held Create(const Attributes& attributes, TensorRTPhase phase = TensorRTPhase::kBUILD) {
  OwnedFields fields(attributes);
  return Held(FindCreator("StofAttention")->createPlugin("layer", fields.get(), phase));
}

inline nvinfer1::Dims ToDims(const std::vector<int64_t>& dims) {
  nvinfer1::Dims made = {};
  made.nbDims = static_cast<int32_t>(dims.size());
  std::copy(dims.begin(), dims.end(), made.d);
  return made;
}

inline nvinfer1::PluginTensorDesc Desc(DataType type, const std::vector<int64_t>& dims,
                                       nvinfer1::TensorFormat format = nvinfer1::TensorFormat::kLINEAR) {
  nvinfer1::PluginTensorDesc desc = {};
  desc.dims = ToDims(dims);
  desc.type = type;
  desc.format = format;
  return desc;
}

inline nvinfer1::DynamicPluginTensorDesc Bounds(DataType type, const std::vector<int64_t>& min,
                                                const std::vector<int64_t>& opt, const std::vector<int64_t>& max) {
  nvinfer1::DynamicPluginTensorDesc made = {};
  std::vector<int64_t> network = opt;
  for (size_t i = 0; i < network.size(); ++i) {
    if (min[i] != max[i]) network[i] = -1;
  }
  made.desc = Desc(type, network);
  made.min = ToDims(min), made.opt = ToDims(opt), made.max = ToDims(max);
  return made;
}

// Base64 as RFC 4648 has it.
inline std::string ToBase64(const std::vector<uint8_t>& bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = i; j < i + 3; ++j) bits = bits << 8 | (j < bytes.size() ? bytes[j] : 0u);
    for (size_t j = 0; j < 4; ++j) {
      text += i + j > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * j) & 63];
    }
  }
  return text;
}

}  // namespace stof::test
#endif  // STOF_TESTS_TRT_HARNESS_H_
