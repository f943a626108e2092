// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes. Not for CPU kernels, which have cpu/simd/algorithms.h.
#ifndef STOF_PLUGINS_CORE_BASE_INTEGERS_H_
#define STOF_PLUGINS_CORE_BASE_INTEGERS_H_

#include <cstdint>

namespace stof {

// x / by, rounded up; x is not negative, by is positive.
constexpr int64_t CeilDiv(int64_t x, int64_t by) { return (x + by - 1) / by; }
// The first multiple of `unit` from x on.
constexpr int64_t RoundUp(int64_t x, int64_t unit) { return CeilDiv(x, unit) * unit; }

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_INTEGERS_H_
