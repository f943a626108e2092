// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/attributes.h"

#include <utility>

#include "plugins/ort/errors.h"

namespace stof::ort {
namespace {

constexpr char kNoName[] = "stof_attribute_that_no_node_has";

}  // namespace

// The C API reports a missing attribute and one of another type by the same code. The message for a name that no node
// has, with the name exchanged, is what a missing attribute gives; any other message is about the type.
template <typename Getter>
bool KernelAttributes::Get(const char* name, AttributeType type, Getter get) const {
  OrtStatus* status = get(name);
  if (status == nullptr) return true;
  const std::string message = Message(status);
  std::string missing = Message(get(kNoName));
  const size_t at = missing.find(kNoName);
  if (at != std::string::npos) missing.replace(at, sizeof kNoName - 1, name);
  if (message != missing) SetMistyped(name, type);
  return false;
}

std::string KernelAttributes::Message(OrtStatus* status) const {
  if (status == nullptr) return std::string();
  std::string message = api_->GetErrorMessage(status);
  api_->ReleaseStatus(status);
  return message;
}

bool KernelAttributes::Int(const char* name, int64_t* value) const {
  return Get(name, AttributeType::kInt,
             [this, value](const char* n) { return api_->KernelInfoGetAttribute_int64(info_, n, value); });
}

bool KernelAttributes::Float(const char* name, float* value) const {
  return Get(name, AttributeType::kFloat,
             [this, value](const char* n) { return api_->KernelInfoGetAttribute_float(info_, n, value); });
}

bool KernelAttributes::String(const char* name, std::string* value) const {
  size_t size = 0;  // counts the NUL
  const auto measure = [this, &size](const char* n) {
    return api_->KernelInfoGetAttribute_string(info_, n, nullptr, &size);
  };
  if (!Get(name, AttributeType::kString, measure) || size == 0) return false;
  std::string text(size, '\0');
  if (HasFailed(api_, api_->KernelInfoGetAttribute_string(info_, name, text.data(), &size))) return false;
  text.resize(size - 1);
  *value = std::move(text);
  return true;
}

bool KernelAttributes::Ints(const char* name, std::vector<int64_t>* value) const {
  size_t count = 0;
  const auto measure = [this, &count](const char* n) {
    return api_->KernelInfoGetAttributeArray_int64(info_, n, nullptr, &count);
  };
  if (!Get(name, AttributeType::kInts, measure)) return false;
  if (count == 0) {  // what an attribute of any other type looks like, since the C API does not look at it
    SetMistyped(name, AttributeType::kInts);
    return false;
  }
  std::vector<int64_t> numbers(count);
  if (HasFailed(api_, api_->KernelInfoGetAttributeArray_int64(info_, name, numbers.data(), &count))) return false;
  *value = std::move(numbers);
  return true;
}

bool InferAttributes::Int(const char* name, int64_t* value) const {
  return Read(name, ORT_OP_ATTR_INT, value, sizeof *value);
}

bool InferAttributes::Float(const char* name, float* value) const {
  return Read(name, ORT_OP_ATTR_FLOAT, value, sizeof *value);
}

bool InferAttributes::String(const char* name, std::string* value) const {
  const OrtOpAttr* attribute = nullptr;
  size_t size = 0;
  if (HasFailed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute))) return false;
  // The first call only asks for the size and reports the missing buffer as an error.
  HasFailed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, nullptr, 0, &size));
  std::string text(size, '\0');
  if (size == 0 || HasFailed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, text.data(), size, &size)))
    return false;
  while (!text.empty() && text.back() == '\0') text.pop_back();
  *value = std::move(text);
  return true;
}

bool InferAttributes::Ints(const char* name, std::vector<int64_t>* value) const {
  const OrtOpAttr* attribute = nullptr;
  size_t size = 0;
  if (HasFailed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute))) return false;
  // As above.
  HasFailed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, nullptr, 0, &size));
  std::vector<int64_t> numbers(size / sizeof(int64_t));
  if (numbers.empty() || HasFailed(api_, api_->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, numbers.data(), size, &size))) {
    return false;
  }
  *value = std::move(numbers);
  return true;
}

bool InferAttributes::Read(const char* name, OrtOpAttrType type, void* value, size_t size) const {
  const OrtOpAttr* attribute = nullptr;
  size_t written = 0;
  return !HasFailed(api_, api_->ShapeInferContext_GetAttribute(context_, name, &attribute)) &&
         !HasFailed(api_, api_->ReadOpAttr(attribute, type, value, size, &written));
}

}  // namespace stof::ort
