// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CPU_SIMD_AVX2_H_
#define STOF_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstdint>

namespace stof {
namespace cpu {
namespace STOF_ISA {

struct Simd {
  static constexpr int kWidth = 8;
  static constexpr int kVectors = 2;  // 6 × 2 accumulators, 2 operands and a broadcast: 15 of 16 registers
  using V = __m256;
  using M = __m256;

  static V Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V Set1(float x) { return _mm256_set1_ps(x); }
  static V Add(V a, V b) { return _mm256_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm256_div_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V Max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static V Min(V a, V b) { return _mm256_min_ps(a, b); }  // likewise
  static M Greater(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static M Or(M a, M b) { return _mm256_or_ps(a, b); }
  static bool Any(M m) { return _mm256_movemask_ps(m) != 0; }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hit = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane)));
  }
  static V WhereEqual(V x, V y, V a, V b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_EQ_OQ)); }
  // The float whose bits are those of v shifted into the exponent.
  static V ShiftToExponent(V v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 23)); }
  static float ReduceAdd(V v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float ReduceMax(V v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
};

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_AVX2_H_
