// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CPU_SIMD_AVX512_H_
#define STOF_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>

namespace stof {
namespace cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 16;
  static constexpr bool kHasFma = true;
  // Attention and GEMM: 6 × 4 accumulators, 4 operands and a broadcast: 29 of 32 registers.
  static constexpr int kVectors = 4;
  // Keys in place that four rows take at a time.
  static constexpr int kKeysOfFourRows = 2;
  // Packed GEMM: 8 × 3 accumulators, 3 operands and a broadcast: 28 of 32 registers. 768, 1152, 2304 and 3072 are
  // multiples of 48.
  static constexpr int kTileRows = 8, kTileVectors = 3;
  // Sparse MLP, tokens and panels of tokens of a dot product, vectors of a row, tokens of a down row: 4 × 6
  // accumulators, 6 operands and a row: 31 of 32 registers. 8 × 2, 2 operands and a factor: 19.
  static constexpr int kDotTokens = 6, kDotPanels = 4, kPairVectors = 8, kDownTokens = 8;
  static constexpr int kPanelRows = 6;  // of a tile of panels, see RowsOfTile
  using V = __m512;
  using M = __mmask16;

  static V Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  // The first `count` values, zeros beyond; 1 <= count <= kWidth.
  static V LoadSome(const float* p, int count) { return _mm512_maskz_loadu_ps(FirstLanes(count), p); }
  static void StoreSome(float* p, V v, int count) { _mm512_mask_storeu_ps(p, FirstLanes(count), v); }
  static V Set1(float x) { return _mm512_set1_ps(x); }
  static V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm512_div_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static V Fms(V a, V b, V c) { return _mm512_fmsub_ps(a, b, c); }  // a * b - c
  static float Fms(float a, float b, float c) { return __builtin_fmaf(a, b, -c); }
  static V Sqrt(V v) { return _mm512_sqrt_ps(v); }
  static V Floor(V v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static V Ceil(V v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC); }
  static V Round(V v) {  // halves to even
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either is NaN
  static V Min(V a, V b) { return _mm512_min_ps(a, b); }  // likewise
  static M Greater(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
  static M GreaterEqual(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
  static M Or(M a, M b) { return static_cast<M>(a | b); }
  static bool Any(M m) { return m != 0; }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) { return _mm512_mask_blend_ps(static_cast<M>(bits), b, a); }
  static V WhereEqual(V x, V y, V a, V b) { return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ), b, a); }
  // Lane i: from[at[i] - base], which is below kWidth.
  static V Pick(const float* from, const int32_t* at, int32_t base) {
    return _mm512_permutexvar_ps(_mm512_sub_epi32(_mm512_loadu_si512(at), _mm512_set1_epi32(base)), Load(from));
  }
  // The float whose bits are those of v shifted into the exponent.
  static V ShiftToExponent(V v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 23)); }
  static float ReduceAdd(V v) { return _mm512_reduce_add_ps(v); }
  static float ReduceMax(V v) { return _mm512_reduce_max_ps(v); }

 private:
  static M FirstLanes(int count) { return static_cast<M>((1u << count) - 1); }
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_AVX512_H_
