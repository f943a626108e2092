// SPDX-License-Identifier: Apache-2.0
// e4m3 by its definition: sign, 4 bits of exponent with bias 7, 3 of the significand; the largest number is 448, and
// all other bits of its magnitude set are NaN.
#pragma once
#include <cmath>
#include <cstdint>

namespace stof::test {

// The nearest number of e4m3, ties to even, at most 448 in magnitude.
inline double RoundToFloat8(double x) {
  if (std::isnan(x)) return x;
  const double size = std::fmin(std::fabs(x), 448.0);
  const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size);
  const double unit = std::ldexp(1.0, exponent - 3);
  return std::copysign(std::fmin(std::nearbyint(size / unit) * unit, 448.0), x);
}
inline uint32_t ToFloat8(float x) {
  if (std::isnan(x)) return 0x7f;
  const double size = std::fabs(RoundToFloat8(x));
  const int exponent = size < 0x1p-6 ? -7 : std::ilogb(size);
  const double units = std::ldexp(size, 3 - (exponent < -6 ? -6 : exponent));
  const auto significand = static_cast<uint32_t>(units);
  const uint32_t bits = exponent < -6 ? significand : static_cast<uint32_t>(exponent + 7) << 3 | (significand & 7);
  return bits | (std::signbit(x) ? 0x80u : 0u);
}
inline float FromFloat8(uint32_t bits) {
  const uint32_t exponent = bits >> 3 & 15, significand = bits & 7;
  if (exponent == 15 && significand == 7) return NAN;
  const double size =
      exponent == 0 ? std::ldexp(significand, -9) : std::ldexp(8 + significand, static_cast<int>(exponent) - 10);
  return static_cast<float>((bits & 0x80) != 0 ? -size : size);
}

}  // namespace stof::test
