// SPDX-License-Identifier: Apache-2.0
// Products of quantized down rows and hidden values in int8, by vectors of AVX-512 VNNI: `vpdpbusd` adds the products
// of four rows' values of a column, which are interleaved, in 32 bits.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_VNNI_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_VNNI_H_

#include "cpu/sparse_mlp/down_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

// AddDot for sixteen columns.
template <typename E>
inline void AddDots(__m512i dots, const GroupScales<E>& group, int64_t n, const TokenHidden& h, float* sums) {
  const __m512 scale = E::Load(group.scales + n);
  __m512 zero = _mm512_set1_ps(group.zero);
  if (group.zeros != nullptr) zero = FromBytes(group.zeros + n);
  const __m512 value = _mm512_fnmadd_ps(zero, _mm512_set1_ps(h.sum), _mm512_cvtepi32_ps(dots));
  const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(h.scale));
  _mm512_storeu_ps(sums + n, _mm512_fmadd_ps(factor, value, _mm512_loadu_ps(sums + n)));
}

// Four vectors of bytes side by side: lane L of to[i] has columns 16 L + 4 i ... 16 L + 4 i + 3, four bytes each.
inline void Interleave(const __m512i* rows, __m512i* to) {
  const __m512i ab[2] = {_mm512_unpacklo_epi8(rows[0], rows[1]), _mm512_unpackhi_epi8(rows[0], rows[1])};
  const __m512i cd[2] = {_mm512_unpacklo_epi8(rows[2], rows[3]), _mm512_unpackhi_epi8(rows[2], rows[3])};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    to[2 * i] = _mm512_unpacklo_epi16(ab[i], cd[i]);
    to[2 * i + 1] = _mm512_unpackhi_epi16(ab[i], cd[i]);
  }
}

// Four vectors of 32 bits: lanes 0 of all, then lanes 1 of all, ...
inline void TransposeLanes(__m512i* v) {
  const __m512i a = _mm512_shuffle_i32x4(v[0], v[1], 0x88), b = _mm512_shuffle_i32x4(v[2], v[3], 0x88);
  const __m512i c = _mm512_shuffle_i32x4(v[0], v[1], 0xdd), d = _mm512_shuffle_i32x4(v[2], v[3], 0xdd);
  v[0] = _mm512_shuffle_i32x4(a, b, 0x88);  // a: lanes 0 and 2 of v[0], then of v[1]
  v[1] = _mm512_shuffle_i32x4(c, d, 0x88);
  v[2] = _mm512_shuffle_i32x4(a, b, 0xdd);
  v[3] = _mm512_shuffle_i32x4(c, d, 0xdd);
}

// The values of a row: 8 bits: 64 columns; 4 bits: 64 columns, the even ones in the low half, then the odd ones.
template <int kBits>
inline __m512i LoadColumns(const uint8_t* row) {
  if constexpr (kBits == 8) return _mm512_loadu_si512(row);
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
  const __m256i low = _mm256_set1_epi8(15);
  const __m256i even = _mm256_and_si256(bytes, low), odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
  return _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1);
}

// Sums of LoadColumns' columns, interleaved, to 16 columns a vector in their order.
template <int kBits>
inline void OrderColumns(__m512i* sums) {
  if constexpr (kBits == 8) {
    TransposeLanes(sums);
    return;
  }
  // Lane L of sums[i] has even columns 32 L + 8 i + 0, 2, 4, 6 for L = 0, 1, and the odd ones beside them for L - 2.
  const __m512i lanes = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) sums[i] = _mm512_permutexvar_epi32(lanes, sums[i]);
  // Now the low half of sums[i] has columns 8 i ... 8 i + 7, and the high half those 32 further.
  const __m512i a = _mm512_shuffle_i64x2(sums[0], sums[1], 0x44), b = _mm512_shuffle_i64x2(sums[2], sums[3], 0x44);
  const __m512i c = _mm512_shuffle_i64x2(sums[0], sums[1], 0xee), d = _mm512_shuffle_i64x2(sums[2], sums[3], 0xee);
  sums[0] = a, sums[1] = b, sums[2] = c, sums[3] = d;
}

template <int kBits, typename E>
void AddOwnColumns(const uint8_t* const* rows, int64_t quads, const TokenHidden& h, const GroupScales<E>& group,
                   int64_t begin, int64_t end, const NextGroup* next, float* sums) {
  for (int64_t n = begin; n < end; n += kInt8Step) {
    if (next != nullptr) next->PrefetchScales(n);
    const int64_t at = n * kBits / 8;
    __m512i dots[4];
    for (__m512i& dot : dots) dot = _mm512_setzero_si512();
    for (int64_t p = 0; p < quads; ++p) {
      if (next != nullptr) next->PrefetchRows(4 * p, p + 1 < quads ? 4 * p + 4 : kMostGroup, n, kBits);
      const __m512i loaded[4] = {LoadColumns<kBits>(rows[4 * p] + at), LoadColumns<kBits>(rows[4 * p + 1] + at),
                                 LoadColumns<kBits>(rows[4 * p + 2] + at), LoadColumns<kBits>(rows[4 * p + 3] + at)};
      __m512i values[4];
      Interleave(loaded, values);
      const __m512i factor = _mm512_set1_epi32(static_cast<int>(h.factors[p]));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) dots[i] = _mm512_dpbusd_epi32(dots[i], values[i], factor);
    }
    OrderColumns<kBits>(dots);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) AddDots(dots[i], group, n + 16 * i, h, sums);
  }
}

// A copy of columns [n, n + columns), a multiple of kInt8Step: [columns / 64, four rows at a time], four vectors of 16
// columns in their order, four bytes each.
template <int kBits>
void PackSomeRows(const uint8_t* const* rows, int64_t count, int64_t n, int64_t columns, uint8_t* packed) {
  const int64_t quads = (count + 3) / 4;
  for (int64_t p = 0; p < quads; ++p) {
    for (int64_t c = 0; c < columns; c += 64) {
      __m512i loaded[4], values[4];
      for (int64_t i = 0; i < 4; ++i) {
        loaded[i] = LoadColumns<kBits>(rows[Min(4 * p + i, count - 1)] + (n + c) * kBits / 8);
      }
      Interleave(loaded, values);
      OrderColumns<kBits>(values);
      for (int64_t i = 0; i < 4; ++i) _mm512_store_si512(packed + (c / 64 * quads + p) * 256 + 64 * i, values[i]);
    }
  }
}

inline void PackRows(const uint8_t* const* rows, int64_t count, int bits, int64_t n, int64_t columns, uint8_t* packed) {
  if (bits == 4) return PackSomeRows<4>(rows, count, n, columns, packed);
  PackSomeRows<8>(rows, count, n, columns, packed);
}

template <int kTokens, typename E>
void AddPackedTokens(const uint8_t* packed, int64_t quads, const TokenHidden* tokens, const uint8_t* of,
                     const GroupScales<E>& group, int64_t n, int64_t columns, float* sums, int64_t stride) {
  const TokenHidden* h[kTokens];
  float* to[kTokens];
#pragma GCC unroll 4
  for (int t = 0; t < kTokens; ++t) h[t] = tokens + of[t], to[t] = sums + of[t] * stride;
  for (int64_t c = 0; c < columns; c += 64) {
    __m512i dots[kTokens][4];
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) dots[t][i] = _mm512_setzero_si512();
    }
    for (int64_t p = 0; p < quads; ++p) {
      const uint8_t* const from = packed + (c / 64 * quads + p) * 256;
      const __m512i values[4] = {_mm512_load_si512(from), _mm512_load_si512(from + 64), _mm512_load_si512(from + 128),
                                 _mm512_load_si512(from + 192)};
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const __m512i factor = _mm512_set1_epi32(static_cast<int>(h[t]->factors[p]));
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) dots[t][i] = _mm512_dpbusd_epi32(dots[t][i], values[i], factor);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) AddDots(dots[t][i], group, n + c + 16 * i, *h[t], to[t]);
    }
  }
}

// Adds the columns of a copy to the sums of the tokens `of`.
template <typename E>
void AddPacked(const uint8_t* packed, int64_t count, int bits, const TokenHidden* tokens, const uint8_t* of,
               int64_t tokens_count, const GroupScales<E>& group, int64_t n, int64_t columns, float* sums,
               int64_t stride) {
  (void)bits;
  const int64_t quads = (count + 3) / 4;
  int64_t t = 0;
  for (; t + 4 <= tokens_count; t += 4) {
    AddPackedTokens<4>(packed, quads, tokens, of + t, group, n, columns, sums, stride);
  }
  for (; t < tokens_count; ++t) {
    AddPackedTokens<1>(packed, quads, tokens, of + t, group, n, columns, sums, stride);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_VNNI_H_
