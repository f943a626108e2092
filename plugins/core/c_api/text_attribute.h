// SPDX-License-Identifier: Apache-2.0
// For programs that make an operator by themselves: a node with one attribute, of text.
#ifndef STOF_PLUGINS_CORE_C_API_TEXT_ATTRIBUTE_H_
#define STOF_PLUGINS_CORE_C_API_TEXT_ATTRIBUTE_H_

#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof {

class TextAttribute final : public AttributeReader {
 public:
  TextAttribute(std::string name, std::string text) : name_(std::move(name)), text_(std::move(text)) {}
  bool Int(const char*, int64_t*) const override { return false; }
  bool Float(const char*, float*) const override { return false; }
  bool Ints(const char*, std::vector<int64_t>*) const override { return false; }
  bool String(const char* name, std::string* value) const override {
    if (name_ != name) return false;
    *value = text_;
    return true;
  }

 private:
  std::string name_, text_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_C_API_TEXT_ATTRIBUTE_H_
