// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/definition.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "plugins/core/c_api/c_api.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/host/quoted.h"

namespace stof::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

// The format of the fields in an engine file; raised when one changes its meaning. The second has lists of integers,
// which libraries that know the first alone would ignore silently.
constexpr char kFormatName[] = "stof_format";
// Engines keep the workspace size that they were built with. Formats 1 and 2 belong to versions without split-KV, which
// asked for less.
constexpr int64_t kFormat = 3, kListFormat = 4;

std::string Hex(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t HashOf(const Fields& fields) {
  uint64_t hash = 0;
  for (const Field& field : fields.all()) {
    uint32_t bits = 0;
    std::memcpy(&bits, &field.f, sizeof bits);
    hash = HashBytes(field.name.data(), field.name.size(), hash);
    hash = MixHash(MixHash(MixHash(hash, static_cast<uint64_t>(field.kind)), static_cast<uint64_t>(field.i)), bits);
    hash = HashBytes(field.s.data(), field.s.size(), hash);
    for (const int32_t number : field.numbers) hash = MixHash(hash, static_cast<uint64_t>(number));
  }
  return hash;
}

}  // namespace

Status Definition::Make(const OpDescription& description, const std::string& layer, const Fields& fields,
                        bool deserialized, std::shared_ptr<const Definition>* definition) {
  if (deserialized) {
    int64_t format = 0;
    if (!fields.Int(kFormatName, &format) || (format != kFormat && format != kListFormat)) {
      return Status::Error("the engine's plugin data has format " + std::to_string(format) +
                           ", which this library does not read: build the engine again, or take the stof library "
                           "that it was built with");
    }
  }
  std::shared_ptr<Definition> made(new Definition(description, layer));
  STOF_RETURN_IF_ERROR(made->Prepare(fields));
  made->Serialize();
  made->Describe();
  *definition = std::move(made);
  return Status();
}

Status Definition::Prepare(const Fields& given) {
  for (const AttributeDescription& attribute : description_.attributes) {
    if (!attribute.is_for_tensorrt) continue;
    if (const Field* field = given.Find(attribute.name)) fields_.Set(*field);
  }
  STOF_RETURN_IF_ERROR(CreateOp(description_, fields_, &op_));
  STOF_RETURN_IF_ERROR(op_->CheckTarget(Target::kTensorRt));
  // An attribute that the operator does not read may be of any type; it is not written to an engine file.
  for (const AttributeDescription& attribute : description_.attributes) {
    const Field* field = fields_.Find(attribute.name);
    if (field == nullptr) continue;
    const bool list = field->kind == Field::Kind::kInts && attribute.type != AttributeType::kInts;
    if (field->kind == Field::Kind::kOther || list) fields_.Remove(attribute.name);
  }
  if (const Field* field = given.Find(kSpareOutputs)) {
    if (field->kind != Field::Kind::kInt || field->i < 0 || field->i > kMostOutputs || !description_.is_variadic) {
      return Status::Error("field spare_outputs is no number of outputs, or of an operator that has none to spare");
    }
    spare_outputs_ = static_cast<int>(field->i);
    fields_.Set(*field);
  }
  const int count = op_->InputCount();
  if (count < description_.typed_inputs || count > kMostInputs || outputs() < 1 || outputs() > kMostOutputs) {
    return Status::Error("has too few or too many inputs or outputs");
  }
  std::vector<Tensor> constants(static_cast<size_t>(count));
  std::vector<std::vector<char>> data(constants.size());
  if (const Field* field = given.Find(kConstants)) {
    if (field->kind != Field::Kind::kString) return Status::Error("field constants is no string");
    STOF_RETURN_IF_ERROR(ParseConstants(field->s, count, constants.data(), data.data()));
    fields_.Set(*field);
  }
  return op_->Prepare(constants.data(), count);
}

void Definition::Serialize() {
  Field format;
  format.name = kFormatName;
  format.kind = Field::Kind::kInt;
  const auto is_list = [](const Field& field) { return field.kind == Field::Kind::kInts; };
  format.i = std::any_of(fields_.all().begin(), fields_.all().end(), is_list) ? kListFormat : kFormat;
  fields_.Set(format);
  ints_.reserve(fields_.all().size());  // serialized_ points into it
  for (const Field& field : fields_.all()) {
    const char* name = field.name.c_str();
    if (field.kind == Field::Kind::kInt) {
      ints_.push_back(static_cast<int32_t>(field.i));
      serialized_.emplace_back(name, &ints_.back(), PluginFieldType::kINT32, 1);
    } else if (field.kind == Field::Kind::kFloat) {
      serialized_.emplace_back(name, &field.f, PluginFieldType::kFLOAT32, 1);
    } else if (field.kind == Field::Kind::kInts) {
      serialized_.emplace_back(name, field.numbers.data(), PluginFieldType::kINT32,
                               static_cast<int32_t>(field.numbers.size()));
    } else if (field.kind == Field::Kind::kString) {
      serialized_.emplace_back(name, field.s.c_str(), PluginFieldType::kCHAR, static_cast<int32_t>(field.s.size() + 1));
    }
  }
  collection_ = {static_cast<int32_t>(serialized_.size()), serialized_.data()};
}

void Definition::Describe() {
  const char* build = stof_build_info();
  timing_id_ = Hex(HashOf(fields_)) + "-" + Hex(HashBytes(build, std::strlen(build), 0));
  metadata_ = description_.name;
  for (const Field& field : fields_.all()) {
    std::string value = field.s;
    if (field.kind == Field::Kind::kInt) value = std::to_string(field.i);
    if (field.kind == Field::Kind::kFloat) value = PrintFloat(field.f);
    for (const int32_t number : field.numbers) value += (value.empty() ? "" : " ") + std::to_string(number);
    if (value.empty() || field.name == kFormatName) continue;
    metadata_ += "; " + field.name + ": " + value.substr(0, field.name == kConstants ? 64 : 512);
  }
  // The engine inspector puts the text into JSON.
  for (char& c : metadata_) {
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) c = '?';
  }
}

}  // namespace stof::trt
