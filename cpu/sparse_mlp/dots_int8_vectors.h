// SPDX-License-Identifier: Apache-2.0
// Tokens in int8, and sums of their products with quantized rows: the vectors of each instruction set.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_INT8_VECTORS_H_
#define STOF_CPU_SPARSE_MLP_DOTS_INT8_VECTORS_H_

#include "cpu/sparse_mlp/elements.h"
#if defined(STOF_NEON)
#include "cpu/sparse_mlp/dots_int8_neon.h"
#endif

namespace stof {
namespace cpu {
namespace {

// Floats beyond the last scale of a row that a vector may read.
constexpr int64_t kInt8LaneBlocks = 8;

// What the products subtract from quantized values already: signed bytes let `maddubs` and `sdot` multiply 8 bits.
constexpr int Int8Offset(int bits) {
#if defined(__AVX512VNNI__) || !(defined(__AVX2__) || defined(STOF_NEON))
  return 0 * bits;
#else
  return bits == 8 ? 128 : 0;
#endif
}

#if defined(__AVX512VNNI__)
constexpr int64_t kInt8Bytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kInt8Bytes = 32;
#elif defined(STOF_NEON)
constexpr int64_t kInt8Bytes = 16;
#else
constexpr int64_t kInt8Bytes = 1;
#endif
// Values of a row that a lane adds, and those in a vector.
constexpr int64_t LaneValues(int bits) { return 32 / bits; }
constexpr int64_t VectorValues(int bits) { return kInt8Bytes * 8 / bits; }

#if defined(__AVX2__)
// RoundToInt8 by vectors of 8: returns how many values are written, and adds them to *sum.
inline int64_t RoundVectorsToInt8(const float* x, int64_t count, float inverse, int8_t* values, int32_t* sum) {
  const __m256 factor = _mm256_set1_ps(inverse);
  __m256i sums = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), factor));
    sums = _mm256_add_epi32(sums, q);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(values + k), _mm_packs_epi16(words, words));
  }
  int32_t lanes[8];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  for (const int32_t lane : lanes) *sum += lane;
  return k;
}

// In each vector of 4-bit values the even ones come first: a byte of two values then needs no unpacking.
inline void PutEvenFirst(int64_t count, int8_t* values) {
  constexpr int64_t kVectors = VectorValues(4) / 32;
  const __m256i low = _mm256_set1_epi16(255);
  for (int64_t first = 0; first < count; first += 32 * kVectors) {
    auto* const to = reinterpret_cast<__m256i*>(values + first);
    __m256i from[kVectors];
    for (int64_t i = 0; i < kVectors; ++i) from[i] = _mm256_loadu_si256(to + i);
    for (int64_t i = 0; i < kVectors; i += 2) {
      const __m256i even = _mm256_packus_epi16(_mm256_and_si256(from[i], low), _mm256_and_si256(from[i + 1], low));
      const __m256i odd = _mm256_packus_epi16(_mm256_srli_epi16(from[i], 8), _mm256_srli_epi16(from[i + 1], 8));
      _mm256_storeu_si256(to + i / 2, _mm256_permute4x64_epi64(even, 0xd8));
      _mm256_storeu_si256(to + (kVectors + i) / 2, _mm256_permute4x64_epi64(odd, 0xd8));
    }
  }
}
#elif !defined(STOF_NEON)
inline int64_t RoundVectorsToInt8(const float*, int64_t, float, int8_t*, int32_t*) { return 0; }
#endif

// values[0, count) = x * inverse, rounded to nearest even; returns their sum.
inline int32_t RoundToInt8(const float* x, int64_t count, float inverse, int8_t* values) {
  int32_t sum = 0;
  for (int64_t k = RoundVectorsToInt8(x, count, inverse, values, &sum); k < count; ++k) {
    const auto q = static_cast<int32_t>(__builtin_nearbyintf(x[k] * inverse));
    values[k] = static_cast<int8_t>(q);
    sum += q;
  }
  return sum;
}

// The scale of values that are rounded to int8 together, and what a value is multiplied by. A block with NaN or
// infinity gets a NaN scale: its dot products are NaN.
inline void ScaleToInt8(const float* x, int64_t count, float* scale, float* inverse) {
  // Magnitudes as integers have the order of the numbers, infinity and NaN being the largest.
  uint32_t most = 0;
  for (int64_t k = 0; k < count; ++k) {
    const uint32_t bits = ToBits(x[k]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  const float largest = FromBits(most);
  const bool is_finite = __builtin_isfinite(largest);
  *scale = is_finite ? largest / 127.0f : __builtin_nanf("");
  *inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  if (!__builtin_isfinite(*inverse)) *inverse = 0.0f;  // 1 / scale overflows: the values are too small to be quantized
}

// Quantizes one token of `size` values in blocks. sums[i] is the scale of block i times the sum of its values. A lane
// of a vector adds LaneValues(bits) products: lane_scales[i] is the scale of those from i * LaneValues(bits) on. Zeros
// fill values and lane scales up to a multiple of kInt8TokenPadding values, and sums up to one of kInt8SumPadding.
inline void QuantizeToken(const float* x, int64_t size, int bits, int64_t block, int8_t* values, float* lane_scales,
                          float* sums) {
  const int64_t padded = (size + kInt8TokenPadding - 1) / kInt8TokenPadding * kInt8TokenPadding;
  Fill(values + size / kInt8TokenPadding * kInt8TokenPadding, values + padded, int8_t{0});
  const int64_t blocks = (size + block - 1) / block, lanes = block / LaneValues(bits);
  Fill(sums + blocks, sums + (blocks + kInt8SumPadding - 1) / kInt8SumPadding * kInt8SumPadding, 0.0f);
  int64_t lane = 0;
  for (int64_t first = 0, i = 0; first < size; first += block, ++i) {
    const int64_t count = Min(block, size - first);
    float scale = 0.0f, inverse = 0.0f;
    ScaleToInt8(x + first, count, &scale, &inverse);
    int32_t sum = 0;
    if (inverse > 0.0f) {
      sum = RoundToInt8(x + first, count, inverse, values + first);
    } else {
      Fill(values + first, values + first + count, int8_t{0});
    }
    sums[i] = scale * static_cast<float>(sum);
    Fill(lane_scales + lane, lane_scales + lane + lanes, scale);
    lane += lanes;
  }
  Fill(lane_scales + Min(lane, padded / LaneValues(bits)), lane_scales + padded / LaneValues(bits), 0.0f);
#if defined(__AVX2__) || defined(STOF_NEON)
  if (bits == 4) PutEvenFirst(padded, values);
#endif
}

#if defined(__AVX512VNNI__)
using Int8Vector = __m512i;
using LaneSums = __m512;
constexpr int64_t kInt8Lanes = 16;

inline LaneSums NoSums() { return _mm512_setzero_ps(); }
inline float AddLanes(LaneSums x) { return _mm512_reduce_add_ps(x); }

// `bytes` of a row, zeros beyond.
inline Int8Vector LoadBytes(const uint8_t* q, int64_t bytes) {
  if (bytes >= kInt8Bytes) return _mm512_loadu_si512(q);
  return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, q);
}

// The values of a vector of a row, ready to be multiplied.
template <int kBits>
struct RowVector512 {
  Int8Vector even, odd;
  explicit RowVector512(Int8Vector q) : even(q), odd(q) {
    if constexpr (kBits == 4) {
      const Int8Vector low = _mm512_set1_epi8(15);
      even = _mm512_and_si512(q, low);
      odd = _mm512_and_si512(_mm512_srli_epi16(q, 4), low);
    }
  }
  // Lane i: the sum of the products of byte 4i to 4i + 3.
  LaneSums Dot(const int8_t* x) const {
    __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), even, _mm512_loadu_si512(x));
    if constexpr (kBits == 4) sums = _mm512_dpbusd_epi32(sums, odd, _mm512_loadu_si512(x + kInt8Bytes));
    return _mm512_cvtepi32_ps(sums);
  }
};
template <int kBits>
using RowVector = RowVector512<kBits>;

// The factor of each lane, where a vector covers kBlocks blocks.
template <int kBlocks>
inline LaneSums LaneFactors(const float* factors) {
  if constexpr (kBlocks == 1) {
    return _mm512_set1_ps(*factors);
  } else {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    constexpr int kShift = kBlocks == 2 ? 3 : kBlocks == 4 ? 2 : 1;
    return _mm512_permutexvar_ps(_mm512_srli_epi32(lanes, kShift), _mm512_castps256_ps512(_mm256_loadu_ps(factors)));
  }
}

inline LaneSums SubtractProducts(const float* a, const float* b, LaneSums sums) {
  return _mm512_fnmadd_ps(_mm512_loadu_ps(a), _mm512_loadu_ps(b), sums);
}
inline LaneSums AddScaled(LaneSums scale, const float* scales, LaneSums dots, LaneSums sums) {
  return _mm512_fmadd_ps(_mm512_mul_ps(scale, _mm512_loadu_ps(scales)), dots, sums);
}
#elif defined(__AVX2__)
using Int8Vector = __m256i;
using LaneSums = __m256;
constexpr int64_t kInt8Lanes = 8;

inline LaneSums NoSums() { return _mm256_setzero_ps(); }
inline float AddLanes(LaneSums x) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

inline Int8Vector LoadBytes(const uint8_t* q, int64_t bytes) {
  if (bytes >= kInt8Bytes) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
  const __m256i lanes = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);  // blocks have a multiple of 8 bytes
  const __m256i is_in = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(bytes)), lanes);
  return _mm256_maskload_epi32(reinterpret_cast<const int*>(q), is_in);
}

template <int kBits>
struct RowVector256 {
  Int8Vector even, odd;  // 8 bits: magnitudes, and signed values
  explicit RowVector256(Int8Vector q) {
    if constexpr (kBits == 4) {
      const Int8Vector low = _mm256_set1_epi8(15);
      even = _mm256_and_si256(q, low);
      odd = _mm256_and_si256(_mm256_srli_epi16(q, 4), low);
    } else {
      odd = _mm256_xor_si256(q, _mm256_set1_epi8(static_cast<char>(0x80)));
      even = _mm256_abs_epi8(odd);
    }
  }
  // Lane i: the sum of the products of byte 4i to 4i + 3.
  LaneSums Dot(const int8_t* x) const {
    const Int8Vector first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    Int8Vector pairs;
    if constexpr (kBits == 4) {  // at most 4 * 15 * 127
      const Int8Vector second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + kInt8Bytes));
      pairs = _mm256_add_epi16(_mm256_maddubs_epi16(even, first), _mm256_maddubs_epi16(odd, second));
    } else {  // at most 2 * 128 * 127
      pairs = _mm256_maddubs_epi16(even, _mm256_sign_epi8(first, odd));
    }
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};
template <int kBits>
using RowVector = RowVector256<kBits>;

template <int kBlocks>
inline LaneSums LaneFactors(const float* factors) {
  if constexpr (kBlocks == 1) {
    return _mm256_set1_ps(*factors);
  } else if constexpr (kBlocks == 2) {
    const __m256d both = _mm256_broadcast_sd(reinterpret_cast<const double*>(factors));
    return _mm256_permutevar_ps(_mm256_castpd_ps(both), _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
  } else {
    const __m256 all = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(factors));
    return _mm256_permutevar_ps(all, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
  }
}

inline LaneSums SubtractProducts(const float* a, const float* b, LaneSums sums) {
  return _mm256_fnmadd_ps(_mm256_loadu_ps(a), _mm256_loadu_ps(b), sums);
}
inline LaneSums AddScaled(LaneSums scale, const float* scales, LaneSums dots, LaneSums sums) {
  return _mm256_fmadd_ps(_mm256_mul_ps(scale, _mm256_loadu_ps(scales)), dots, sums);
}
#endif

// A row and a token.
struct Int8Operands {
  const uint8_t* q;
  const float* row_scales;  // of each block, and kInt8LaneBlocks zeros
  const float* zeros;       // scale * zero point of each block, and zeros up to a multiple of kInt8SumPadding
  const int8_t* x;
  const float *lane_scales, *sums;  // of the token
  const uint8_t* next;              // the row that is read later: it is prefetched along the way
};

#if defined(__AVX2__) || defined(STOF_NEON)
// dots[i]: the sum over blocks of the scales times (q · x - zero point * sum of x), kCount of them. kOneRow: all have
// the row of the first one.
template <int kBits, int kBlocks, int kCount, bool kOneRow>
__attribute__((noinline)) void DotVectors(int64_t bytes, int64_t zero_blocks, int shift, const Int8Operands* of,
                                          float* dots) {
  constexpr int64_t kValues = VectorValues(kBits);
  LaneSums sums[kCount];
  const uint8_t *q[kCount], *next[kCount];
  const int8_t* x[kCount];
  const float *row_scales[kCount], *lane_scales[kCount];
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) {
    sums[i] = NoSums();
    q[i] = of[i].q, next[i] = of[i].next, x[i] = of[i].x, row_scales[i] = of[i].row_scales,
    lane_scales[i] = of[i].lane_scales;
  }
  for (int64_t n = 0; n < zero_blocks; n += kInt8Lanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sums[i] = SubtractProducts(of[i].zeros + n, of[i].sums + n, sums[i]);
  }
  const auto add = [&](int64_t at, int64_t left) __attribute__((always_inline)) {
    const int64_t value = at * 8 / kBits;
    const int64_t block = kBlocks == 1 ? value >> shift : value / kValues * kBlocks;
    RowVector<kBits> row(LoadBytes(q[0] + at, left));
    LaneSums scale = LaneFactors<kBlocks>(row_scales[0] + block);
    __builtin_prefetch(next[0] + at, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      if (!kOneRow && i > 0) {
        __builtin_prefetch(next[i] + at, 0, 2);
        row = RowVector<kBits>(LoadBytes(q[i] + at, left));
        scale = LaneFactors<kBlocks>(row_scales[i] + block);
      }
      sums[i] = AddScaled(scale, lane_scales[i] + value / LaneValues(kBits), row.Dot(x[i] + value), sums[i]);
    }
  };
  int64_t at = 0;
  for (; at + kInt8Bytes <= bytes; at += kInt8Bytes) add(at, kInt8Bytes);
  if (at < bytes) add(at, bytes - at);
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) dots[i] = AddLanes(sums[i]);
}

template <int kBits, int kBlocks>
void DotSome(int64_t bytes, int64_t zero_blocks, int shift, int count, bool is_one_row, const Int8Operands* of,
             float* dots) {
  if (is_one_row && count == 4) return DotVectors<kBits, kBlocks, 4, true>(bytes, zero_blocks, shift, of, dots);
  if (is_one_row && count == 3) return DotVectors<kBits, kBlocks, 3, true>(bytes, zero_blocks, shift, of, dots);
  if (count == 4) return DotVectors<kBits, kBlocks, 4, false>(bytes, zero_blocks, shift, of, dots);
  for (int i = 0; i < count; ++i) DotVectors<kBits, kBlocks, 1, true>(bytes, zero_blocks, shift, of + i, dots + i);
}

// Products of `blocks` blocks.
inline void MultiplyRows(const NeuronRows& rows, int64_t blocks, bool has_zeros, int count, bool is_one_row,
                         const Int8Operands* of, float* dots) {
  const int64_t bytes = blocks * rows.block * rows.bits / 8;
  const auto run = [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    constexpr int64_t kValues = VectorValues(kBits);
    const auto with = [&](auto covered) {
      DotSome<kBits, decltype(covered)::value>(bytes, has_zeros ? blocks : 0, rows.block_shift, count, is_one_row, of,
                                               dots);
    };
    if constexpr (kValues >= 128) {
      if (rows.block == kValues / 8) return with(Constant<8>());
    }
    if constexpr (kValues >= 64) {
      if (rows.block == kValues / 4) return with(Constant<4>());
    }
    if (rows.block == kValues / 2) return with(Constant<2>());
    return with(Constant<1>());
  };
  return rows.bits == 4 ? run(Constant<4>()) : run(Constant<8>());
}
#else
inline void MultiplyRows(const NeuronRows& rows, int64_t blocks, bool has_zeros, int count, bool is_one_row,
                         const Int8Operands* of, float* dots) {
  (void)is_one_row;
  for (int n = 0; n < count; ++n) {
    float sum = 0.0f;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t first = i * rows.block;
      int32_t dot = 0;
      for (int64_t k = first; k < first + rows.block; ++k) dot += QuantizedAt(of[n].q, rows.bits, k) * of[n].x[k];
      sum += of[n].row_scales[i] * of[n].lane_scales[first / LaneValues(rows.bits)] * static_cast<float>(dot);
      if (has_zeros) sum -= of[n].zeros[i] * of[n].sums[i];
    }
    dots[n] = sum;
  }
}
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_INT8_VECTORS_H_
