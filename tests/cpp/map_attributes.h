// SPDX-License-Identifier: Apache-2.0
// Attributes of a node from maps, for tests that create operators without a runtime.
#ifndef STOF_TESTS_CPP_MAP_ATTRIBUTES_H_
#define STOF_TESTS_CPP_MAP_ATTRIBUTES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof::test {

class MapAttributes final : public AttributeReader {
 public:
  std::map<std::string, int64_t> ints;
  std::map<std::string, float> floats;
  std::map<std::string, std::string> strings;
  bool Int(const char* name, int64_t* value) const override { return Find(ints, name, value); }
  bool Float(const char* name, float* value) const override { return Find(floats, name, value); }
  bool String(const char* name, std::string* value) const override { return Find(strings, name, value); }
  bool Ints(const char*, std::vector<int64_t>*) const override { return false; }

 private:
  template <typename T>
  static bool Find(const std::map<std::string, T>& map, const char* name, T* value) {
    const auto found = map.find(name);
    if (found == map.end()) return false;
    *value = found->second;
    return true;
  }
};

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_MAP_ATTRIBUTES_H_
