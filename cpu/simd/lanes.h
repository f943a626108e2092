// SPDX-License-Identifier: Apache-2.0
// Outer products by lanes of vectors, for NEON. An FMA takes a lane of a register as its factor. So four factors of a
// row are one load, and no instruction broadcasts them: a broadcast from memory would take an issue slot of the FMA
// units.
#ifndef STOF_CPU_SIMD_LANES_H_
#define STOF_CPU_SIMD_LANES_H_

#include <cstdint>

#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

#if defined(STOF_NEON)
// sum[i][j] += lane kStep of x[i] * y(j). One operand at a time: it and the factors leave registers to 24 sums.
template <int kStep, int kRows, int kVectors, typename Operand>
__attribute__((always_inline)) inline void AddLane(const V (&x)[kRows], const Operand& y, V (&sum)[kRows][kVectors]) {
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) {
    const V operand = y(j);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) sum[i][j] = Simd::FmaLane<kStep>(operand, x[i], sum[i][j]);
  }
}

// sum[i][j] += x(i)[s] * y(s, j) for steps s = 0 ... 3 in their order. x: the factors of a row, as a vector.
template <int kRows, int kVectors, typename Factors, typename Operand>
__attribute__((always_inline)) inline void AddFourSteps(const Factors& x, const Operand& y, V (&sum)[kRows][kVectors]) {
  V factors[kRows];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) factors[i] = x(i);
  AddLane<0>(factors, [&](int j) __attribute__((always_inline)) { return y(0, j); }, sum);
  AddLane<1>(factors, [&](int j) __attribute__((always_inline)) { return y(1, j); }, sum);
  AddLane<2>(factors, [&](int j) __attribute__((always_inline)) { return y(2, j); }, sum);
  AddLane<3>(factors, [&](int j) __attribute__((always_inline)) { return y(3, j); }, sum);
}

// sum[i][j] += x[i] * y[j] for rows kFirst ... kRows - 1.
template <int kFirst = 0, int kRows, int kVectors>
__attribute__((always_inline)) inline void AddStep(const float* x, const V (&y)[kVectors], V (&sum)[kRows][kVectors]) {
  if constexpr (kFirst + 4 <= kRows) {
    const V factors = Simd::Load(x + kFirst);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      sum[kFirst][j] = Simd::FmaLane<0>(y[j], factors, sum[kFirst][j]);
      sum[kFirst + 1][j] = Simd::FmaLane<1>(y[j], factors, sum[kFirst + 1][j]);
      sum[kFirst + 2][j] = Simd::FmaLane<2>(y[j], factors, sum[kFirst + 2][j]);
      sum[kFirst + 3][j] = Simd::FmaLane<3>(y[j], factors, sum[kFirst + 3][j]);
    }
    AddStep<kFirst + 4>(x, y, sum);
  } else if constexpr (kFirst + 2 <= kRows) {
    const float32x2_t factors = vld1_f32(x + kFirst);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      sum[kFirst][j] = vfmaq_lane_f32(sum[kFirst][j], y[j], factors, 0);
      sum[kFirst + 1][j] = vfmaq_lane_f32(sum[kFirst + 1][j], y[j], factors, 1);
    }
    AddStep<kFirst + 2>(x, y, sum);
  } else if constexpr (kFirst < kRows) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[kFirst][j] = vfmaq_n_f32(sum[kFirst][j], y[j], x[kFirst]);
  }
}
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_LANES_H_
