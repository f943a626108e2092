// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_BASE_FLOAT8_H_
#define STOF_PLUGINS_CORE_BASE_FLOAT8_H_

#include <cstdint>

namespace stof {

// An fp8 value (e4m3fn) in memory: sign, 4 bits of exponent with bias 7, 3 of the significand. 0x7f and 0xff are NaN.
struct Float8 {
  uint8_t bits;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_FLOAT8_H_
