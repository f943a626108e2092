// SPDX-License-Identifier: Apache-2.0
// Products of quantized down rows and hidden values in int8, by vectors of NEON: the values of four rows of a column
// are interleaved, and ByteSums adds their products in 32 bits.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_NEON_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_NEON_H_

#include "cpu/sparse_mlp/down_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kBlockColumns = 32;  // columns that are summed at a time
constexpr int kBlockVectors = 8;       // of four columns each
#if defined(__ARM_FEATURE_DOTPROD)
constexpr int kTokensTogether = 2;  // 16 sums of 4 columns
#else
constexpr int kTokensTogether = 1;  // also 16 accumulators: without sdot ByteSums has two
#endif
constexpr int64_t kQuadBytes = kBlockColumns * 4;  // of four rows in a block of a copy
static_assert(kInt8Step % kBlockColumns == 0, "a step is whole blocks");

// AddDot for four columns. Values of 8 bits were multiplied less 128, and so is the zero point: the result is the same.
template <int kBits, typename E>
inline void AddDots(int32x4_t dots, const GroupScales<E>& group, int64_t n, const TokenHidden& h, float* sums) {
  const V less = Simd::Set1(static_cast<float>(Int8Offset(kBits)));
  const V zero = Simd::Sub(group.zeros != nullptr ? FromBytes(group.zeros + n) : Simd::Set1(group.zero), less);
  const V value = vfmsq_f32(vcvtq_f32_s32(dots), zero, Simd::Set1(h.sum));
  const V factor = Simd::Mul(E::Load(group.scales + n), Simd::Set1(h.scale));
  Simd::Store(sums + n, Simd::Fma(factor, value, Simd::Load(sums + n)));
}

inline int8x16_t FactorQuad(const TokenHidden& h, int64_t quad) {
  return vreinterpretq_s8_u32(vdupq_n_u32(h.factors[quad]));
}

// Sixteen columns of four rows side by side: to[i] has columns 4 i ... 4 i + 3, four bytes each.
inline void Interleave(const int8x16_t* rows, int8x16_t* to) {
  const int8x16x2_t ab = vzipq_s8(rows[0], rows[1]), cd = vzipq_s8(rows[2], rows[3]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const int16x8x2_t all = vzipq_s16(vreinterpretq_s16_s8(ab.val[i]), vreinterpretq_s16_s8(cd.val[i]));
    to[2 * i] = vreinterpretq_s8_s16(all.val[0]);
    to[2 * i + 1] = vreinterpretq_s8_s16(all.val[1]);
  }
}

// A block of four rows. 8 bits: vector i has columns 4 i ... 4 i + 3. 4 bits: i < 4 has the even ones of 8 i ... 8 i +
// 7, vector i + 4 the odd ones.
template <int kBits>
inline void LoadBlock(const uint8_t* const* rows, int64_t at, int8x16_t* to) {
  int8x16_t first[4], second[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t bytes = vld1q_u8(rows[i] + at);
    if constexpr (kBits == 4) {
      first[i] = vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15)));
      second[i] = vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4));
    } else {
      first[i] = SubtractOffset(bytes);
      second[i] = SubtractOffset(vld1q_u8(rows[i] + at + 16));
    }
  }
  Interleave(first, to);
  Interleave(second, to + 4);
}

// Adds the sums of LoadBlock's vectors to columns n ... of a token.
template <int kBits, typename E>
inline void AddBlock(const ByteSums* dots, const GroupScales<E>& group, int64_t n, const TokenHidden& h, float* sums) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBits == 4) {
      const int32x4x2_t columns = vzipq_s32(dots[i].Value(), dots[i + 4].Value());
      AddDots<kBits>(columns.val[0], group, n + 8 * i, h, sums);
      AddDots<kBits>(columns.val[1], group, n + 8 * i + 4, h, sums);
    } else {
      AddDots<kBits>(dots[2 * i].Value(), group, n + 8 * i, h, sums);
      AddDots<kBits>(dots[2 * i + 1].Value(), group, n + 8 * i + 4, h, sums);
    }
  }
}

template <int kBits, typename E>
void AddOwnColumns(const uint8_t* const* rows, int64_t quads, const TokenHidden& h, const GroupScales<E>& group,
                   int64_t begin, int64_t end, const NextGroup* next, float* sums) {
  for (int64_t n = begin; n < end; n += kBlockColumns) {
    const bool is_step = next != nullptr && (n - begin) % kInt8Step == 0;
    if (is_step) next->PrefetchScales(n);
    ByteSums dots[kBlockVectors];
    for (int64_t p = 0; p < quads; ++p) {
      if (is_step) next->PrefetchRows(4 * p, p + 1 < quads ? 4 * p + 4 : kMostGroup, n, kBits);
      int8x16_t values[kBlockVectors];
      LoadBlock<kBits>(rows + 4 * p, n * kBits / 8, values);
      const int8x16_t factor = FactorQuad(h, p);
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) dots[i].Add(values[i], factor);
    }
    AddBlock<kBits>(dots, group, n, h, sums);
  }
}

// A copy of columns [n, n + columns), a multiple of kInt8Step: [columns / kBlockColumns, four rows at a time], the
// vectors of LoadBlock.
template <int kBits>
void PackSomeRows(const uint8_t* const* rows, int64_t count, int64_t n, int64_t columns, uint8_t* packed) {
  const int64_t quads = (count + 3) / 4;
  for (int64_t p = 0; p < quads; ++p) {
    const uint8_t* quad[4];
    for (int64_t i = 0; i < 4; ++i) quad[i] = rows[Min(4 * p + i, count - 1)];
    for (int64_t c = 0; c < columns; c += kBlockColumns) {
      int8x16_t values[kBlockVectors];
      LoadBlock<kBits>(quad, (n + c) * kBits / 8, values);
      auto* const to = reinterpret_cast<int8_t*>(packed + (c / kBlockColumns * quads + p) * kQuadBytes);
      for (int i = 0; i < kBlockVectors; ++i) vst1q_s8(to + 16 * i, values[i]);
    }
  }
}

inline void PackRows(const uint8_t* const* rows, int64_t count, int bits, int64_t n, int64_t columns, uint8_t* packed) {
  if (bits == 4) return PackSomeRows<4>(rows, count, n, columns, packed);
  PackSomeRows<8>(rows, count, n, columns, packed);
}

template <int kBits, int kTokens, typename E>
void AddPackedTokens(const uint8_t* packed, int64_t quads, const TokenHidden* tokens, const uint8_t* of,
                     const GroupScales<E>& group, int64_t n, int64_t columns, float* sums, int64_t stride) {
  for (int64_t c = 0; c < columns; c += kBlockColumns) {
    ByteSums dots[kTokens][kBlockVectors];
    for (int64_t p = 0; p < quads; ++p) {
      const auto* const from = reinterpret_cast<const int8_t*>(packed + (c / kBlockColumns * quads + p) * kQuadBytes);
      int8x16_t factors[kTokens];
#pragma GCC unroll 2
      for (int t = 0; t < kTokens; ++t) factors[t] = FactorQuad(tokens[of[t]], p);
#pragma GCC unroll 8
      for (int i = 0; i < kBlockVectors; ++i) {
        const int8x16_t values = vld1q_s8(from + 16 * i);
#pragma GCC unroll 2
        for (int t = 0; t < kTokens; ++t) dots[t][i].Add(values, factors[t]);
      }
    }
#pragma GCC unroll 2
    for (int t = 0; t < kTokens; ++t) {
      AddBlock<kBits>(dots[t], group, n + c, tokens[of[t]], sums + of[t] * stride);
    }
  }
}

template <int kBits, typename E>
void AddPackedColumns(const uint8_t* packed, int64_t quads, const TokenHidden* tokens, const uint8_t* of,
                      int64_t tokens_count, const GroupScales<E>& group, int64_t n, int64_t columns, float* sums,
                      int64_t stride) {
  int64_t t = 0;
  for (; t + kTokensTogether <= tokens_count; t += kTokensTogether) {
    AddPackedTokens<kBits, kTokensTogether>(packed, quads, tokens, of + t, group, n, columns, sums, stride);
  }
  for (; t < tokens_count; ++t)
    AddPackedTokens<kBits, 1>(packed, quads, tokens, of + t, group, n, columns, sums, stride);
}

// Adds the columns of a copy to the sums of the tokens `of`.
template <typename E>
void AddPacked(const uint8_t* packed, int64_t count, int bits, const TokenHidden* tokens, const uint8_t* of,
               int64_t tokens_count, const GroupScales<E>& group, int64_t n, int64_t columns, float* sums,
               int64_t stride) {
  const int64_t quads = (count + 3) / 4;
  if (bits == 4) {
    return AddPackedColumns<4>(packed, quads, tokens, of, tokens_count, group, n, columns, sums, stride);
  }
  AddPackedColumns<8>(packed, quads, tokens, of, tokens_count, group, n, columns, sums, stride);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_NEON_H_
