// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CPU_SIMD_AVX2_H_
#define STOF_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstdint>

namespace stof {
namespace cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 8;
  static constexpr bool kHasFma = true;
  // Attention and GEMM: 6 × 2 accumulators, 2 operands and a broadcast: 15 of 16 registers.
  static constexpr int kVectors = 2;
  // Keys in place that four rows take at a time: 12 sums hide the latency of an FMA, and 16 registers hold them.
  static constexpr int kKeysOfFourRows = 3;
  // Packed GEMM: 6 × 2 accumulators, as above.
  static constexpr int kTileRows = 6, kTileVectors = 2;
  // Sparse MLP, tokens and panels of tokens of a dot product, vectors of a row, tokens of a down row: 4 × 3
  // accumulators, 3 operands and a row: 16 of 16 registers. 6 × 2, 2 operands and a factor: 15.
  static constexpr int kDotTokens = 3, kDotPanels = 1, kPairVectors = 8, kDownTokens = 6;
  static constexpr int kPanelRows = 6;  // of a tile of panels, see RowsOfTile
  using V = __m256;
  using M = __m256;

  static V Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
  // The first `count` values, zeros beyond; 1 <= count <= kWidth.
  static V LoadSome(const float* p, int count) { return _mm256_maskload_ps(p, FirstLanes(count)); }
  static void StoreSome(float* p, V v, int count) { _mm256_maskstore_ps(p, FirstLanes(count), v); }
  static V Set1(float x) { return _mm256_set1_ps(x); }
  static V Add(V a, V b) { return _mm256_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm256_div_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static V Fms(V a, V b, V c) { return _mm256_fmsub_ps(a, b, c); }  // a * b - c
  static float Fms(float a, float b, float c) { return __builtin_fmaf(a, b, -c); }
  static V Sqrt(V v) { return _mm256_sqrt_ps(v); }
  static V Floor(V v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static V Ceil(V v) { return _mm256_round_ps(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
  static V Round(V v) {  // halves to even
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static V Max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either is NaN
  static V Min(V a, V b) { return _mm256_min_ps(a, b); }  // likewise
  static M Greater(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
  static M GreaterEqual(V a, V b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
  static M Or(M a, M b) { return _mm256_or_ps(a, b); }
  static bool Any(M m) { return _mm256_movemask_ps(m) != 0; }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) {
    const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hit = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(hit, lane)));
  }
  static V WhereEqual(V x, V y, V a, V b) { return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_EQ_OQ)); }
  // Lane i: from[at[i] - base], which is below kWidth.
  static V Pick(const float* from, const int32_t* at, int32_t base) {
    const __m256i lanes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
    return _mm256_permutevar8x32_ps(Load(from), _mm256_sub_epi32(lanes, _mm256_set1_epi32(base)));
  }
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

 private:
  static __m256i FirstLanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_AVX2_H_
