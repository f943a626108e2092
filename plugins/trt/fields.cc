// SPDX-License-Identifier: Apache-2.0
#include "plugins/trt/fields.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "plugins/core/host/quoted.h"

namespace stof::trt {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

constexpr int32_t kMostFields = 256;
constexpr size_t kMostName = 256;
constexpr int32_t kMostNumbers = 64;  // of a list
constexpr int64_t kMostElements = int64_t{1} << 31;

// Data in an engine file may stand at any address.
template <typename T>
T Load(const void* data) {
  T value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

Status ReadString(const PluginField& from, Field* field) {
  const char* text = static_cast<const char*>(from.data);
  auto size = static_cast<size_t>(from.length);
  while (size > 0 && text[size - 1] == '\0') --size;  // TensorRT's parser counts the NUL at the end
  if (size > 0 && std::memchr(text, 0, size) != nullptr) {
    return Status::Error("field " + Quote(field->name, kMostQuoted) + " has a NUL inside");
  }
  field->kind = Field::Kind::kString;
  field->s.assign(text, size);
  return Status();
}

bool Fits(int64_t number) {
  return number >= std::numeric_limits<int32_t>::min() && number <= std::numeric_limits<int32_t>::max();
}

Status ReadNumbers(const PluginField& from, Field* field) {
  const bool wide = from.type == PluginFieldType::kINT64;
  const size_t size = wide ? sizeof(int64_t) : sizeof(int32_t);
  for (int32_t i = 0; i < from.length; ++i) {
    const char* at = static_cast<const char*>(from.data) + static_cast<size_t>(i) * size;
    const int64_t number = wide ? Load<int64_t>(at) : Load<int32_t>(at);
    if (!Fits(number)) {
      return Status::Error("field " + Quote(field->name, kMostQuoted) + " has " + std::to_string(number) +
                           ", which does not fit 32 bits");
    }
    field->numbers.push_back(static_cast<int32_t>(number));
  }
  field->kind = Field::Kind::kInts;
  return Status();
}

Status ReadOne(const PluginField& from, Field* field) {
  if (from.name == nullptr) return Status::Error("a plugin field has no name");
  const size_t size = strnlen(from.name, kMostName);
  if (size == 0 || size == kMostName) return Status::Error("a plugin field has an empty or a very long name");
  field->name.assign(from.name, size);
  if (from.length < 0 || (from.length > 0 && from.data == nullptr)) {
    return Status::Error("field " + Quote(field->name, kMostQuoted) + " has length " + std::to_string(from.length) +
                         (from.data == nullptr ? " and no data" : ""));
  }
  if (from.type == PluginFieldType::kCHAR) return ReadString(from, field);
  field->kind = Field::Kind::kOther;
  if (from.length > 1 && from.length <= kMostNumbers &&
      (from.type == PluginFieldType::kINT32 || from.type == PluginFieldType::kINT64)) {
    return ReadNumbers(from, field);
  }
  if (from.length != 1) return Status();
  switch (from.type) {
    case PluginFieldType::kINT8:
      field->i = Load<int8_t>(from.data);
      break;
    case PluginFieldType::kINT16:
      field->i = Load<int16_t>(from.data);
      break;
    case PluginFieldType::kINT32:
      field->i = Load<int32_t>(from.data);
      break;
    case PluginFieldType::kINT64:
      field->i = Load<int64_t>(from.data);
      break;
    case PluginFieldType::kFLOAT32:
      field->f = Load<float>(from.data);
      field->kind = Field::Kind::kFloat;
      return Status();
    case PluginFieldType::kFLOAT64:
      field->f = static_cast<float>(Load<double>(from.data));
      field->kind = Field::Kind::kFloat;
      return Status();
    default:
      return Status();
  }
  field->kind = Field::Kind::kInt;
  if (!Fits(field->i)) {
    return Status::Error("field " + Quote(field->name, kMostQuoted) + " is " + std::to_string(field->i) +
                         ", which does not fit 32 bits");
  }
  return Status();
}

bool Before(const Field& field, const std::string& name) { return field.name < name; }

// The value of a base64 digit; -1: none.
int Digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

Status FromBase64(const char* text, size_t size, std::vector<char>* data) {
  if (size % 4 != 0) return Status::Error("base64 data has a length that is no multiple of 4");
  size_t padding = 0;
  while (padding < 2 && padding < size && text[size - 1 - padding] == '=') ++padding;
  data->clear();
  data->reserve(size / 4 * 3);
  uint32_t bits = 0;
  for (size_t i = 0; i < size; ++i) {
    const int digit = i >= size - padding ? 0 : Digit(text[i]);
    if (digit < 0) return Status::Error("base64 data has a character that is no digit");
    bits = bits << 6 | static_cast<uint32_t>(digit);
    if (i % 4 != 3) continue;
    for (int shift = 16; shift >= 0; shift -= 8) data->push_back(static_cast<char>(bits >> shift & 0xff));
    bits = 0;
  }
  data->resize(data->size() - padding);
  return Status();
}

Status ParseShape(const std::string& text, Tensor* tensor) {
  int64_t elements = 1;
  size_t at = 0;
  while (at < text.size()) {
    int64_t dim = 0;
    const size_t begin = at;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
      dim = dim * 10 + (text[at] - '0');
      if (dim > kMostElements) return Status::Error("a dimension is larger than 2^31");
    }
    if (at == begin || tensor->rank == kMaxRank) return Status::Error("the shape is not like 4x128, of rank 8 at most");
    if (at < text.size() && (text[at] != 'x' || ++at == text.size())) {
      return Status::Error("the shape is not like 4x128");
    }
    if (dim != 0 && elements > kMostElements / dim) return Status::Error("more than 2^31 elements");
    elements *= dim;
    tensor->dims[tensor->rank++] = dim;
  }
  return tensor->rank == 0 ? Status::Error("there is no shape") : Status();
}

// "TYPE SHAPE DATA".
Status ParseConstant(const std::string& text, Tensor* tensor, std::vector<char>* data) {
  const size_t first = text.find(' ');
  const size_t second = first == std::string::npos ? first : text.find(' ', first + 1);
  if (second == std::string::npos) return Status::Error("expected 'INPUT TYPE SHAPE DATA'");
  const std::string type = text.substr(0, first);
  int64_t bits = 0;
  if (type == "bool") {
    tensor->dtype = DType::kBool, bits = 1;
  } else if (type == "uint8") {
    tensor->dtype = DType::kU8, bits = 8;
  } else if (type == "int32") {
    tensor->dtype = DType::kI32, bits = 32;
  } else if (type == "int64") {
    tensor->dtype = DType::kI64, bits = 64;
  } else {
    return Status::Error("has type " + Quote(type, 16) + ", expected bool, uint8, int32 or int64");
  }
  STOF_RETURN_IF_ERROR(ParseShape(text.substr(first + 1, second - first - 1), tensor));
  std::vector<char> bytes;
  STOF_RETURN_IF_ERROR(FromBase64(text.data() + second + 1, text.size() - second - 1, &bytes));
  const int64_t elements = tensor->Elements();
  if (static_cast<int64_t>(bytes.size()) != (elements * bits + 7) / 8) {
    return Status::Error("has " + std::to_string(bytes.size()) + " bytes, expected " +
                         std::to_string((elements * bits + 7) / 8));
  }
  if (bits == 1) {
    data->resize(static_cast<size_t>(elements));
    for (size_t i = 0; i < data->size(); ++i) (*data)[i] = static_cast<char>(bytes[i / 8] >> i % 8 & 1);
  } else {
    *data = std::move(bytes);
  }
  tensor->data = data->data();
  return Status();
}

}  // namespace

Status Fields::Read(const nvinfer1::PluginFieldCollection* collection, Fields* fields) {
  fields->fields_.clear();
  if (collection == nullptr) return Status::Error("there are no plugin fields");
  if (collection->nbFields < 0 || collection->nbFields > kMostFields ||
      (collection->nbFields > 0 && collection->fields == nullptr)) {
    return Status::Error("a collection of " + std::to_string(collection->nbFields) + " plugin fields" +
                         (collection->fields == nullptr ? " without an array" : ""));
  }
  for (int32_t i = 0; i < collection->nbFields; ++i) {
    Field field;
    STOF_RETURN_IF_ERROR(ReadOne(collection->fields[i], &field));
    if (fields->Find(field.name.c_str()) != nullptr) {
      return Status::Error("field " + Quote(field.name, kMostQuoted) + " comes twice");
    }
    fields->Set(std::move(field));
  }
  return Status();
}

const Field* Fields::Find(const char* name) const {
  const auto at = std::lower_bound(fields_.begin(), fields_.end(), name, Before);
  return at != fields_.end() && at->name == name ? &*at : nullptr;
}

void Fields::Set(Field field) {
  const auto at = std::lower_bound(fields_.begin(), fields_.end(), field.name, Before);
  if (at != fields_.end() && at->name == field.name) {
    *at = std::move(field);
  } else {
    fields_.insert(at, std::move(field));
  }
}

void Fields::Remove(const char* name) {
  const auto at = std::lower_bound(fields_.begin(), fields_.end(), name, Before);
  if (at != fields_.end() && at->name == name) fields_.erase(at);
}

bool Fields::Int(const char* name, int64_t* value) const {
  const Field* field = Find(name);
  if (field == nullptr) return false;
  if (field->kind != Field::Kind::kInt) {
    SetMistyped(name, AttributeType::kInt);
    return false;
  }
  *value = field->i;
  return true;
}

bool Fields::Float(const char* name, float* value) const {
  const Field* field = Find(name);
  if (field == nullptr) return false;
  if (field->kind != Field::Kind::kFloat) {
    SetMistyped(name, AttributeType::kFloat);
    return false;
  }
  *value = field->f;
  return true;
}

bool Fields::String(const char* name, std::string* value) const {
  const Field* field = Find(name);
  if (field == nullptr) return false;
  if (field->kind != Field::Kind::kString) {
    SetMistyped(name, AttributeType::kString);
    return false;
  }
  *value = field->s;
  return true;
}

bool Fields::Ints(const char* name, std::vector<int64_t>* value) const {
  const Field* field = Find(name);
  if (field == nullptr) return false;
  if (field->kind == Field::Kind::kInt) {  // a list of one number looks like this
    *value = {field->i};
    return true;
  }
  if (field->kind != Field::Kind::kInts) {
    SetMistyped(name, AttributeType::kInts);
    return false;
  }
  value->assign(field->numbers.begin(), field->numbers.end());
  return true;
}

Status ParseConstants(const std::string& text, int count, Tensor* tensors, std::vector<char>* data) {
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(';', begin), text.size());
    size_t at = begin;
    int input = 0;
    for (; at < end && text[at] >= '0' && text[at] <= '9' && input < count; ++at) input = input * 10 + (text[at] - '0');
    const std::string where =
        "field constants, entry " + Quote(std::string_view(text).substr(begin, end - begin)) + ": ";
    if (at == begin || at == end || text[at] != ' ' || input >= count || tensors[input].rank != 0) {
      return Status::Error(where + "expected the index of one of " + std::to_string(count) + " inputs, each once");
    }
    const Status status = ParseConstant(text.substr(at + 1, end - at - 1), &tensors[input], &data[input]);
    if (!status.ok()) return Status::Error(where + status.message());
    begin = end + 1;
  }
  return Status();
}

}  // namespace stof::trt
