// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CPU_SIMD_AVX512_H_
#define STOF_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>

namespace stof {
namespace cpu {
namespace STOF_ISA {

struct Simd {
  static constexpr int kWidth = 16;
  static constexpr int kVectors = 4;  // 6 × 4 accumulators, 4 operands and a broadcast: 29 of 32 registers
  using V = __m512;
  using M = __mmask16;

  static V Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V Set1(float x) { return _mm512_set1_ps(x); }
  static V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm512_div_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static V Min(V a, V b) { return _mm512_min_ps(a, b); }  // likewise
  static M Greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M Or(M a, M b) { return static_cast<M>(a | b); }
  static bool Any(M m) { return m != 0; }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) { return _mm512_mask_blend_ps(static_cast<M>(bits), b, a); }
  static V WhereEqual(V x, V y, V a, V b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), b, a); }
  // The float whose bits are those of v shifted into the exponent.
  static V ShiftToExponent(V v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23)); }
  static float ReduceAdd(V v) { return _mm512_reduce_add_ps(v); }
  static float ReduceMax(V v) { return _mm512_reduce_max_ps(v); }
};

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_AVX512_H_
