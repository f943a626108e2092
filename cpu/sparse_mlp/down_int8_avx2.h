// SPDX-License-Identifier: Apache-2.0
// Products of quantized down rows and hidden values in int8, by vectors of AVX2. A product of two rows fits 16 bits
// with 4-bit values, and so does the sum of eight of them.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_AVX2_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_AVX2_H_

#include "cpu/sparse_mlp/down_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kPairsOf16Bits = 8;

inline __m256i LoadInts(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline __m256i FactorPair(const TokenHidden& h, int64_t pair) {
  return _mm256_set1_epi32(static_cast<int>(h.factors[pair]));
}
// The same as 16-bit values.
inline __m256i WideFactorPair(const TokenHidden& h, int64_t pair) {
  const auto low = static_cast<int8_t>(h.factors[pair]), high = static_cast<int8_t>(h.factors[pair] >> 8);
  return _mm256_set1_epi32(static_cast<uint16_t>(low) | high * 65536);
}

// AddDot for eight columns.
template <typename E>
inline void AddDots(__m256i dots, const GroupScales<E>& group, int64_t n, const TokenHidden& h, float* sums) {
  float scales[8];
  __m256 scale;
  if constexpr (E::kType == DType::kF32) {
    scale = _mm256_loadu_ps(group.scales + n);
  } else {
    ToFloats(group.scales + n, E::kType, 8, scales);
    scale = _mm256_loadu_ps(scales);
  }
  __m256 zero = _mm256_set1_ps(group.zero);
  if (group.zeros != nullptr) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(group.zeros + n));
    zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  const __m256 value = _mm256_fnmadd_ps(zero, _mm256_set1_ps(h.sum), _mm256_cvtepi32_ps(dots));
  const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(h.scale));
  _mm256_storeu_ps(sums + n, _mm256_fmadd_ps(factor, value, _mm256_loadu_ps(sums + n)));
}

// Sums of 16 bits of 16 columns, of two halves of up to 32 rows, in 32 bits: columns 0 to 7 and 8 to 15.
inline void Widen(__m256i a, __m256i b, __m256i* dots) {
  const __m256i ones = _mm256_set1_epi16(1);
  const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), ones);
  const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), ones);
  dots[0] = _mm256_permute2x128_si256(low, high, 0x20);
  dots[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

// 64 columns of 4 bits of two rows, a byte of each side by side. Columns 16 i ... 16 i + 15 are in the low lanes of
// even[i] and odd[i], those 32 further in the high ones.
struct PairOfRows {
  __m256i even[2], odd[2];
  PairOfRows(const uint8_t* first, const uint8_t* second) {
    const __m256i low = _mm256_set1_epi8(15), a = LoadInts(first), b = LoadInts(second);
    const __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      even[i] = _mm256_and_si256(both[i], low);
      odd[i] = _mm256_and_si256(_mm256_srli_epi16(both[i], 4), low);
    }
  }
};

inline __m256i AddPair(__m256i values, __m256i factor, __m256i sums) {
  return _mm256_add_epi16(sums, _mm256_maddubs_epi16(values, factor));
}

// Adds pairs [first, last), at most kPairsOf16Bits of them, of 64 columns.
inline void AddPairs4(const uint8_t* const* rows, const TokenHidden& h, int64_t first, int64_t last, int64_t n,
                      __m256i* even, __m256i* odd) {
  for (int64_t p = first; p < last; ++p) {
    const PairOfRows pair(rows[2 * p] + n / 2, rows[2 * p + 1] + n / 2);
    const __m256i factor = FactorPair(h, p);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      even[i] = AddPair(pair.even[i], factor, even[i]);
      odd[i] = AddPair(pair.odd[i], factor, odd[i]);
    }
  }
}

// Adds 16-bit sums of even and odd columns, of two halves of up to 32 rows, to 32 columns in 32 bits: columns 0 to 7
// and 8 to 15, then those 32 further.
inline void WidenColumns(__m256i even_a, __m256i odd_a, __m256i even_b, __m256i odd_b, __m256i* dots) {
  __m256i wide[4];
  Widen(_mm256_unpacklo_epi16(even_a, odd_a), _mm256_unpacklo_epi16(even_b, odd_b), wide);
  Widen(_mm256_unpackhi_epi16(even_a, odd_a), _mm256_unpackhi_epi16(even_b, odd_b), wide + 2);
  dots[0] = _mm256_add_epi32(dots[0], wide[0]);
  dots[1] = _mm256_add_epi32(dots[1], wide[2]);
  dots[2] = _mm256_add_epi32(dots[2], wide[1]);
  dots[3] = _mm256_add_epi32(dots[3], wide[3]);
}

// The first column of dots[i] of WidenColumns.
constexpr int64_t kWideColumns[4] = {0, 8, 32, 40};

// dots[i][4] += columns 16 i ... of 64 from n on, of pairs [first, last), at most 2 * kPairsOf16Bits of them.
inline void DotColumns4(const uint8_t* const* rows, const TokenHidden& h, int64_t first, int64_t last, int64_t n,
                        __m256i (*dots)[4]) {
  const __m256i none = _mm256_setzero_si256();
  __m256i even[4] = {none, none, none, none}, odd[4] = {none, none, none, none};
  const int64_t middle = Min(first + kPairsOf16Bits, last);
  AddPairs4(rows, h, first, middle, n, even, odd);
  if (middle < last) AddPairs4(rows, h, middle, last, n, even + 2, odd + 2);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) WidenColumns(even[i], odd[i], even[i + 2], odd[i + 2], dots[i]);
}

// dots[2]: 16 columns of 8 bits.
inline void DotColumns8(const uint8_t* const* rows, const TokenHidden& h, int64_t pairs, int64_t n, __m256i* dots) {
  __m256i low = _mm256_setzero_si256(), high = low;
  for (int64_t p = 0; p < pairs; ++p) {
    const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * p] + n)));
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[2 * p + 1] + n)));
    const __m256i factor = WideFactorPair(h, p);
    low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factor));
    high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factor));
  }
  // Columns 0 to 3 and 8 to 11, 4 to 7 and 12 to 15.
  dots[0] = _mm256_permute2x128_si256(low, high, 0x20);
  dots[1] = _mm256_permute2x128_si256(low, high, 0x31);
}

// Columns [begin, end) of sums: those of the token's own rows.
template <typename E>
void AddOwnRows(const uint8_t* const* own, int64_t count, int bits, const TokenHidden& h, const GroupScales<E>& group,
                int64_t begin, int64_t end, const NextGroup* next, float* sums) {
  const uint8_t* rows[kMostGroup + 1];
  Copy(own, own + count, rows);
  rows[count] = rows[count - 1];  // an odd number of rows: its factor is 0
  const int64_t pairs = (count + 1) / 2;
  int64_t n = begin;
  for (; n + kInt8Step <= end; n += kInt8Step) {
    if (next != nullptr) next->PrefetchScales(n), next->PrefetchRows(0, kMostGroup, n, bits);
    if (bits == 4) {
      __m256i dots[2][4];
      for (auto& half : dots) {
        for (__m256i& dot : half) dot = _mm256_setzero_si256();
      }
      for (int64_t p = 0; p < pairs; p += 2 * kPairsOf16Bits) {
        DotColumns4(rows, h, p, Min(p + 2 * kPairsOf16Bits, pairs), n, dots);
      }
      for (int i = 0; i < 2; ++i) {
        for (int j = 0; j < 4; ++j) AddDots(dots[i][j], group, n + 16 * i + kWideColumns[j], h, sums);
      }
      continue;
    }
    for (int64_t c = n; c < n + kInt8Step; c += 16) {
      __m256i dots[2];
      DotColumns8(rows, h, pairs, c, dots);
      AddDots(dots[0], group, c, h, sums);
      AddDots(dots[1], group, c + 8, h, sums);
    }
  }
  AddColumnsOneByOne(own, count, bits, h, group, n, end, sums);
}

// Columns of a copy: a multiple of kInt8Step.
inline int64_t PackedColumns(int64_t rows, int bits) {
  const int64_t bytes = (rows + 1) / 2 * 2 * (bits == 4 ? 1 : 2);
  return Clamp(kPackedBytes / bytes / kInt8Step * kInt8Step, kInt8Step, kInt8Columns);
}
static_assert(kInt8Step * kMostGroup * 2 <= 2 * kPackedBytes, "a copy holds the largest group's values of 8 bits");

// A copy of columns [n, n + columns), a multiple of kInt8Step. 4 bits: [columns / 64, 2, pairs], even and odd columns
// of PairOfRows. 8 bits: [columns / 16, pairs], 16 bits for each of two rows, of columns 0 to 7 and then of 8 to 15.
inline void PackRows(const uint8_t* const* rows, int64_t count, int bits, int64_t n, int64_t columns, uint8_t* packed) {
  const int64_t pairs = (count + 1) / 2;
  for (int64_t p = 0; p < pairs; ++p) {
    const uint8_t* const first = rows[2 * p] + n * bits / 8;
    const uint8_t* const second = rows[Min(2 * p + 1, count - 1)] + n * bits / 8;
    if (bits == 4) {
      for (int64_t c = 0; c < columns; c += 64) {
        const PairOfRows pair(first + c / 2, second + c / 2);
        for (int64_t i = 0; i < 2; ++i) {
          auto* const to = reinterpret_cast<__m256i*>(packed + ((c / 32 + i) * pairs + p) * 64);
          _mm256_store_si256(to, pair.even[i]);
          _mm256_store_si256(to + 1, pair.odd[i]);
        }
      }
      continue;
    }
    for (int64_t c = 0; c < columns; c += 16) {
      const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + c));
      const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second + c));
      auto* const to = reinterpret_cast<__m256i*>(packed + (c / 16 * pairs + p) * 64);
      _mm256_store_si256(to, _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)));
      _mm256_store_si256(to + 1, _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)));
    }
  }
}

// Adds 32 columns of a copy, of 4 bits, to the sums of kTokens tokens; the first column is n.
template <int kTokens, typename E>
inline void AddPacked4(const uint8_t* packed, int64_t pairs, const TokenHidden* const* h, const GroupScales<E>& group,
                       int64_t n, float* const* to) {
  const __m256i none = _mm256_setzero_si256();
  __m256i dots[kTokens][4];
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) dots[t][0] = dots[t][1] = dots[t][2] = dots[t][3] = none;
  for (int64_t first = 0; first < pairs; first += 2 * kPairsOf16Bits) {
    __m256i even[2][kTokens], odd[2][kTokens];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 2
      for (int t = 0; t < kTokens; ++t) even[half][t] = odd[half][t] = none;
      const int64_t begin = first + half * kPairsOf16Bits, end = Min(begin + kPairsOf16Bits, pairs);
      for (int64_t p = begin; p < end; ++p) {
        const __m256i of_even = LoadInts(packed + 64 * p), of_odd = LoadInts(packed + 64 * p + 32);
#pragma GCC unroll 2
        for (int t = 0; t < kTokens; ++t) {
          const __m256i factor = FactorPair(*h[t], p);
          even[half][t] = AddPair(of_even, factor, even[half][t]);
          odd[half][t] = AddPair(of_odd, factor, odd[half][t]);
        }
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < kTokens; ++t) WidenColumns(even[0][t], odd[0][t], even[1][t], odd[1][t], dots[t]);
  }
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < 4; ++j) AddDots(dots[t][j], group, n + kWideColumns[j], *h[t], to[t]);
  }
}

// Adds 16 columns of a copy, of 8 bits.
template <int kTokens, typename E>
inline void AddPacked8(const uint8_t* packed, int64_t pairs, const TokenHidden* const* h, const GroupScales<E>& group,
                       int64_t n, float* const* to) {
  __m256i dots[kTokens][2];
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) dots[t][0] = dots[t][1] = _mm256_setzero_si256();
  for (int64_t p = 0; p < pairs; ++p) {
    const __m256i first = LoadInts(packed + 64 * p), second = LoadInts(packed + 64 * p + 32);
#pragma GCC unroll 2
    for (int t = 0; t < kTokens; ++t) {
      const __m256i factor = WideFactorPair(*h[t], p);
      dots[t][0] = _mm256_add_epi32(dots[t][0], _mm256_madd_epi16(first, factor));
      dots[t][1] = _mm256_add_epi32(dots[t][1], _mm256_madd_epi16(second, factor));
    }
  }
#pragma GCC unroll 2
  for (int t = 0; t < kTokens; ++t) {
    AddDots(dots[t][0], group, n, *h[t], to[t]);
    AddDots(dots[t][1], group, n + 8, *h[t], to[t]);
  }
}

template <int kTokens, typename E>
void AddPackedTokens(const uint8_t* packed, int64_t count, int bits, const TokenHidden* tokens, const uint8_t* of,
                     const GroupScales<E>& group, int64_t n, int64_t columns, float* sums, int64_t stride) {
  const int64_t pairs = (count + 1) / 2;
  const TokenHidden* h[kTokens];
  float* to[kTokens];
  for (int t = 0; t < kTokens; ++t) h[t] = tokens + of[t], to[t] = sums + of[t] * stride;
  if (bits == 8) {
    for (int64_t c = 0; c < columns; c += 16) {
      AddPacked8<kTokens>(packed + c / 16 * pairs * 64, pairs, h, group, n + c, to);
    }
    return;
  }
  for (int64_t c = 0; c < columns; c += 64) {
    for (int64_t i = 0; i < 2; ++i) {
      AddPacked4<kTokens>(packed + (c / 32 + i) * pairs * 64, pairs, h, group, n + c + 16 * i, to);
    }
  }
}

// Adds the columns of a copy to the sums of the tokens `of`.
template <typename E>
void AddPacked(const uint8_t* packed, int64_t count, int bits, const TokenHidden* tokens, const uint8_t* of,
               int64_t tokens_count, const GroupScales<E>& group, int64_t n, int64_t columns, float* sums,
               int64_t stride) {
  int64_t t = 0;
  for (; t + 2 <= tokens_count; t += 2) {
    AddPackedTokens<2>(packed, count, bits, tokens, of + t, group, n, columns, sums, stride);
  }
  if (t < tokens_count) AddPackedTokens<1>(packed, count, bits, tokens, of + t, group, n, columns, sums, stride);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_AVX2_H_
