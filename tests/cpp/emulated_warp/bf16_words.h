// SPDX-License-Identifier: Apache-2.0
// Numbers of the tests of device code on an emulated warp.
#ifndef STOF_TESTS_CPP_EMULATED_WARP_BF16_WORDS_H_
#define STOF_TESTS_CPP_EMULATED_WARP_BF16_WORDS_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include "tests/cpp/check.h"

namespace stof::test {

// Cuts the lower half off.
inline uint16_t ToBf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}
// Two elements in a word.
inline uint32_t Word(float low, float high) { return ToBf16(low) | static_cast<uint32_t>(ToBf16(high)) << 16; }

// Small integers: their products have no rounding errors.
inline std::vector<float> DrawIntegers(Random* random, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random->Range(-8, 8));
  return values;
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_EMULATED_WARP_BF16_WORDS_H_
