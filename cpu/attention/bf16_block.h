// SPDX-License-Identifier: Apache-2.0
// bf16 matmuls of attention with fp32 sums: rounding and packing, QK^T and PV of a few query rows. Operands are packed
// by kDepth along the sum, as the instructions take them.
//   keys:    [head / kDepth, kPanel keys, kDepth]  of each panel
//   values:  [keys / kDepth, value size, kDepth]
#ifndef STOF_CPU_ATTENTION_BF16_BLOCK_H_
#define STOF_CPU_ATTENTION_BF16_BLOCK_H_

#include <cstdint>
#include <cstring>

#include "cpu/attention/packed_type.h"
#include "cpu/attention/register_block.h"
#include "cpu/attention/scratch.h"
#include "cpu/simd/bf16.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/quantized.h"

namespace stof {
namespace cpu {
namespace {

#if defined(STOF_NEON)
constexpr int kDepth = 4;
#else
constexpr int kDepth = 2;
#endif

// A row of any type as bf16. floats: scratch of the row's size.
inline void ToBf16(const char* from, DType dtype, int64_t count, float* floats, Bf16* to) {
  if (dtype == DType::kBF16) {
    std::memcpy(to, from, static_cast<size_t>(count) * 2);
  } else if (dtype == DType::kF32) {
    RoundToBf16(reinterpret_cast<const float*>(from), count, to);
  } else {
    KvToFloats(from, dtype, count, floats);
    RoundToBf16(floats, count, to);
  }
}

// Packs one panel of `count` keys, which lies on one page.
inline void PackKeys(const Rows& from, int64_t count, const AttentionArgs& args, const Scratch& scratch, Bf16* to) {
  const int64_t size = args.shape.D, padded = PackedKeySize(size);
  const DType dtype = KvType(args.shape);
  Bf16* const rows = scratch.rounded_rows;
  for (int64_t j = 0; j < kPanel; ++j) {
    Bf16* const row = rows + j * padded;
    if (j < count) ToBf16(from.At(0) + j * from.stride * from.item_size, dtype, size, scratch.converted_row, row);
    for (int64_t d = j < count ? size : 0; d < padded; ++d) row[d] = 0;
  }
#if defined(STOF_NEON)
  for (int64_t d = 0; d < padded; d += kDepth) {
    for (int64_t j = 0; j < kPanel; ++j, to += kDepth) std::memcpy(to, rows + j * padded + d, 2 * kDepth);
  }
#else
  // Pairs are moved as floats.
  PackPanel(reinterpret_cast<const float*>(rows), padded / kDepth, kPanel, padded / kDepth,
            reinterpret_cast<float*>(to));
#endif
}

// Packs the values of `count` keys, and zeros up to whole panels.
inline void PackValues(const Rows& from, int64_t count, const AttentionArgs& args, const Scratch& scratch, Bf16* to) {
  const int64_t size = args.shape.Dv, ldo = scratch.ldo;
  const DType dtype = KvType(args.shape);
  for (int64_t k = 0; k < RoundUp(count, kPanel); k += kDepth, to += kDepth * ldo) {
    for (int64_t j = 0; j < kDepth; ++j) {
      Bf16* const row = scratch.rounded_rows + j * ldo;
      const bool is_key = k + j < count;
      if (is_key) ToBf16(from.At(k + j), dtype, size, scratch.converted_row, row);
      for (int64_t d = is_key ? size : 0; d < ldo; ++d) row[d] = 0;
    }
    const Bf16* const low = scratch.rounded_rows;
    int64_t d = 0;
#if defined(STOF_NEON)
    for (; d + 8 <= ldo; d += 8) {
      uint16x8x4_t x;
      for (int j = 0; j < kDepth; ++j) x.val[j] = vld1q_u16(low + j * ldo + d);
      vst4q_u16(to + kDepth * d, x);
    }
#elif defined(__AVX512F__)
    const Bf16* const high = low + ldo;
    for (; d + 16 <= ldo; d += 16) {
      const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(low + d)));
      const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i_u*>(high + d)));
      _mm512_storeu_si512(to + 2 * d, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
    }
#endif
    for (; d < ldo; ++d) {
      for (int64_t j = 0; j < kDepth; ++j) to[kDepth * d + j] = low[j * ldo + d];
    }
  }
}

// Panels of packed keys in fp32, [D, kPanel] each. to: scratch for them.
inline const float* AsFloats(const float* from, int64_t /*panels*/, int64_t /*size*/, float* /*to*/) { return from; }
inline const float* AsFloats(const Bf16* from, int64_t panels, int64_t size, float* to) {
  const float* const result = to;
  for (int64_t p = 0; p < panels; ++p, from += PackedKeySize(size) * kPanel, to += size * kPanel) {
    for (int64_t d = 0; d < size; ++d) {
      const Bf16* const keys = from + d / kDepth * kDepth * kPanel + d % kDepth;
      for (int64_t j = 0; j < kPanel; ++j) to[d * kPanel + j] = Bfloat16ToFloat(keys[j * kDepth]);
    }
  }
  return result;
}

// Rounds a vector, as RoundToBf16 does.
inline void StoreRounded(V x, Bf16* to) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  vst1_bf16(reinterpret_cast<bfloat16_t*>(to), vcvt_bf16_f32(x));
#else
  float lanes[kWidth];
  Simd::Store(lanes, x);
  RoundToBf16(lanes, kWidth, to);
#endif
}

// QK^T of a strip: s[kRows, kBlock panels] = factor * (q[kRows, depth] · keys) + start[kRows]. depth: of whole pairs.
template <int kRows, int kBlock>
__attribute__((noinline)) void Bf16Scores(const Bf16* q, int64_t ldq, int64_t depth, const Bf16* keys,
                                          int64_t panel_stride, float factor, const float* start, float* s,
                                          int64_t lds);

// PV of a strip: o[kRows, kBlock vectors] += p[kRows, keys of the runs] · v. The tile's matmul is summed by itself
// first, as in AddValues. A run begins with a panel, and takes its last one whole: weights beyond its end are 0.
template <int kRows, int kBlock>
__attribute__((noinline)) void AddBf16Values(const Bf16* p, int64_t ldp, const Run* runs, int count, const Bf16* v,
                                             int64_t ldv, float* o, int64_t ldo);

#if defined(STOF_TILES)

template <int kRows, int kBlock>
void Bf16Scores(const Bf16* q, int64_t ldq, int64_t depth, const Bf16* keys, int64_t panel_stride, float factor,
                const float* start, float* s, int64_t lds) {
  static_assert(kRows == kSumRows);
  STOF_STORE_FOR_TILES();
  ZeroSumTiles<kBlock>();
  for (int64_t d = 0; d < depth; d += kTileDepth) {
    AddTileProducts<kBlock>(q + d, 2 * ldq, keys + d * kPanel, 2 * kDepth * kPanel, 2 * panel_stride);
  }
  StoreSumTiles<kBlock>(s, 4 * lds, 4 * kPanel);
  const V by = Simd::Set1(factor);
  for (int r = 0; r < kRows; ++r) {
    const V first = Simd::Set1(start[r]);
    for (int c = 0; c < kBlock * kPanel; c += kWidth) {
      Simd::Store(s + r * lds + c, Simd::Fma(Simd::Load(s + r * lds + c), by, first));
    }
  }
}

template <int kRows, int kBlock>
void AddBf16Values(const Bf16* p, int64_t ldp, const Run* runs, int count, const Bf16* v, int64_t ldv, float* o,
                   int64_t ldo) {
  static_assert(kRows == kSumRows);
  STOF_STORE_FOR_TILES();
  ZeroSumTiles<kBlock>();
  for (int i = 0; i < count; ++i) {
    const int64_t last = RoundUp(runs[i].last, kPanel);
    int64_t k = runs[i].first;
    for (; k + kTileDepth <= last; k += kTileDepth) {
      AddTileProducts<kBlock>(p + k, 2 * ldp, v + k / kDepth * ldv, 2 * ldv, 2 * kDepth * kSumColumns);
    }
    if (k < last) AddLastTileProducts<kBlock>(p + k, 2 * ldp, v + k / kDepth * ldv, 2 * ldv, 2 * kDepth * kSumColumns);
  }
  alignas(64) float sums[kRows * kBlock * kSumColumns];
  constexpr int kColumns = kBlock * kSumColumns;
  StoreSumTiles<kBlock>(sums, 4 * kColumns, 4 * kSumColumns);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; c += kWidth) {
      Simd::Store(o + r * ldo + c, Simd::Add(Simd::Load(o + r * ldo + c), Simd::Load(sums + r * kColumns + c)));
    }
  }
}

#elif defined(__AVX512BF16__)

inline __m512bh LoadPairs(const Bf16* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }
inline __m512bh BroadcastPair(const Bf16* at) {
  int32_t pair;
  std::memcpy(&pair, at, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

template <int kRows, int kBlock>
void Bf16Scores(const Bf16* q, int64_t ldq, int64_t depth, const Bf16* keys, int64_t panel_stride, float factor,
                const float* start, float* s, int64_t lds) {
  V sum[kRows][kBlock];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Set1(0.0f);
  }
#pragma GCC unroll 4
  for (int64_t d = 0; d < depth; d += kDepth) {
    __m512bh key[kBlock];
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) key[j] = LoadPairs(keys + d * kPanel + j * panel_stride);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512bh x = BroadcastPair(q + r * ldq + d);
#pragma GCC unroll 4
      for (int j = 0; j < kBlock; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], x, key[j]);
    }
  }
  const V by = Simd::Set1(factor);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) {
      Simd::Store(s + r * lds + j * kPanel, Simd::Fma(sum[r][j], by, Simd::Set1(start[r])));
    }
  }
}

template <int kRows, int kBlock>
void AddBf16Values(const Bf16* p, int64_t ldp, const Run* runs, int count, const Bf16* v, int64_t ldv, float* o,
                   int64_t ldo) {
  V sum[kRows][kBlock];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Set1(0.0f);
  }
  for (int i = 0; i < count; ++i) {
    const int64_t last = RoundUp(runs[i].last, kPanel);
    const Bf16* value = v + runs[i].first / kDepth * ldv;
#pragma GCC unroll 4
    for (int64_t k = runs[i].first; k < last; k += kDepth, value += ldv) {
      __m512bh x[kBlock];
#pragma GCC unroll 4
      for (int j = 0; j < kBlock; ++j) x[j] = LoadPairs(value + j * kDepth * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512bh w = BroadcastPair(p + r * ldp + k);
#pragma GCC unroll 4
        for (int j = 0; j < kBlock; ++j) sum[r][j] = _mm512_dpbf16_ps(sum[r][j], w, x[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) {
      float* const to = o + r * ldo + j * kWidth;
      Simd::Store(to, Simd::Add(Simd::Load(to), sum[r][j]));
    }
  }
}

#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

inline bfloat16x8_t LoadFactors(const Bf16* at) { return vreinterpretq_bf16_u16(vld1q_u16(at)); }

// sums[row pair][column pair] += rows · columns over a depth of 8. A vector of left or right is 2 rows or columns of 4,
// and one of sums is 2 rows of 2 columns. step: between groups of kDepth of the right.
template <int kPairs, int kColumns>
inline void AddMatrixProducts(const Bf16* left, int64_t ld, const Bf16* right, int64_t step,
                              float32x4_t (&sums)[kPairs][kColumns]) {
  bfloat16x8_t factors[2][kPairs];
#pragma GCC unroll 4
  for (int r = 0; r < kPairs; ++r) {
    const uint64x2_t a = vreinterpretq_u64_u16(vld1q_u16(left + 2 * r * ld));
    const uint64x2_t b = vreinterpretq_u64_u16(vld1q_u16(left + (2 * r + 1) * ld));
    factors[0][r] = vreinterpretq_bf16_u64(vzip1q_u64(a, b));
    factors[1][r] = vreinterpretq_bf16_u64(vzip2q_u64(a, b));
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) {
      const bfloat16x8_t x = LoadFactors(right + half * step + 2 * kDepth * j);
#pragma GCC unroll 4
      for (int r = 0; r < kPairs; ++r) sums[r][j] = vbfmmlaq_f32(sums[r][j], factors[half][r], x);
    }
  }
}

// Calls store(row, vector of 4 columns, sums).
template <int kPairs, int kColumns, typename Store>
inline void ForEachSum(const float32x4_t (&sums)[kPairs][kColumns], const Store& store) {
#pragma GCC unroll 4
  for (int r = 0; r < kPairs; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kColumns; j += 2) {
      const float64x2_t a = vreinterpretq_f64_f32(sums[r][j]), b = vreinterpretq_f64_f32(sums[r][j + 1]);
      store(2 * r, j / 2, vreinterpretq_f32_f64(vzip1q_f64(a, b)));
      store(2 * r + 1, j / 2, vreinterpretq_f32_f64(vzip2q_f64(a, b)));
    }
  }
}

template <int kPairs, int kColumns>
inline void ClearSums(float32x4_t (&sums)[kPairs][kColumns]) {
#pragma GCC unroll 4
  for (int r = 0; r < kPairs; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kColumns; ++j) sums[r][j] = vdupq_n_f32(0.0f);
  }
}

// The sums are of one panel: 4 vectors.
template <int kRows, int kBlock>
void Bf16Scores(const Bf16* q, int64_t ldq, int64_t depth, const Bf16* keys, int64_t /*panel_stride*/, float factor,
                const float* start, float* s, int64_t lds) {
  static_assert(kBlock * kWidth == kPanel);
  float32x4_t sums[kRows / 2][2 * kBlock];
  ClearSums(sums);
  // Heads are padded to a multiple of this step.
  for (int64_t d = 0; d < depth; d += 2 * kDepth)
    AddMatrixProducts(q + d, ldq, keys + d * kPanel, kDepth * kPanel, sums);
  ForEachSum(sums, [&](int r, int j, V x) {
    Simd::Store(s + r * lds + j * kWidth, Simd::Fma(x, Simd::Set1(factor), Simd::Set1(start[r])));
  });
}

template <int kRows, int kBlock>
void AddBf16Values(const Bf16* p, int64_t ldp, const Run* runs, int count, const Bf16* v, int64_t ldv, float* o,
                   int64_t ldo) {
  float32x4_t sums[kRows / 2][2 * kBlock];
  ClearSums(sums);
  for (int i = 0; i < count; ++i) {
    const int64_t last = RoundUp(runs[i].last, kPanel);
    for (int64_t k = runs[i].first; k < last; k += 2 * kDepth) {
      AddMatrixProducts(p + k, ldp, v + k / kDepth * ldv, ldv, sums);
    }
  }
  ForEachSum(sums, [&](int r, int j, V x) {
    float* const to = o + r * ldo + j * kWidth;
    Simd::Store(to, Simd::Add(Simd::Load(to), x));
  });
}

#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_BF16_BLOCK_H_
