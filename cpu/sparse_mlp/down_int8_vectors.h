// SPDX-License-Identifier: Apache-2.0
// Products of quantized down rows and hidden values in int8: the vectors of each instruction set.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_VECTORS_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_VECTORS_H_

#include "cpu/sparse_mlp/dots_int8_vectors.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kMostGroup = 256;           // neurons that share a scale
constexpr int64_t kInt8Columns = 256;         // of a copy at most, and the unit of a step over columns
constexpr int64_t kInt8Step = 64;             // columns that are summed at a time
constexpr int64_t kInt8SumBytes = 256 << 10;  // of fp32 sums between two groups
constexpr int64_t kPackedBytes = 16 << 10;    // of rows that tokens share: half of a L1 cache
constexpr int64_t kLeastShared = 3;           // tokens from which on rows are copied for them
#if defined(__AVX512VNNI__) || defined(STOF_NEON)
constexpr int64_t kRowsTogether = 4;  // rows whose values of a column are interleaved
#else
constexpr int64_t kRowsTogether = 2;
#endif

#if defined(__AVX2__) || defined(STOF_NEON)
constexpr bool kSharesRows = true;
#else
constexpr bool kSharesRows = false;  // a copy would be as slow to read
#endif

// A token's hidden values of a group. Not initialized: clearing one for each of 64 tokens costs time.
struct TokenHidden {
  float scale;
  float sum;                         // of the values in int8
  uint32_t factors[kMostGroup / 2];  // the values of kRowsTogether rows side by side: four bytes, or a pair twice
};

// The group that is added after this one: its rows and scales, from column 0 on. They are prefetched between
// multiplications, since many prefetches at once stall the loads.
struct NextGroup {
  static constexpr int64_t kLine = 64;
  const char* rows[kMostGroup];
  int64_t count = 0;
  const char* scales = nullptr;
  int64_t scale_size = 0;

  // The scales of columns [n, n + kInt8Step).
  void PrefetchScales(int64_t n) const {
    if (count == 0) return;
    for (int64_t at = 0; at < kInt8Step * scale_size; at += kLine) {
      __builtin_prefetch(scales + n * scale_size + at, 0, 2);
    }
  }
  // These columns of rows [first, last), of which there may be fewer.
  void PrefetchRows(int64_t first, int64_t last, int64_t n, int bits) const {
    for (int64_t i = first; i < Min(last, count); ++i) __builtin_prefetch(rows[i] + n * bits / 8, 0, 2);
  }
};

// Scales of a group, at column 0. zeros: nullptr: `zero` for all columns.
template <typename E>
struct GroupScales {
  const typename E::T* scales;
  const uint8_t* zeros;
  float zero;
};

// factors of `count` values.
inline void PackHidden(const int8_t* values, int64_t count, uint32_t* factors) {
  for (int64_t i = 0; i < count; i += kRowsTogether) {
    uint32_t word = 0;
    for (int64_t j = 0; j < kRowsTogether && i + j < count; ++j) {
      word |= static_cast<uint32_t>(static_cast<uint8_t>(values[i + j])) << 8 * j;
    }
    factors[i / kRowsTogether] = kRowsTogether == 2 ? word | word << 16 : word;
  }
}

inline int32_t FactorOf(const TokenHidden& h, int64_t row) {
  return static_cast<int8_t>(h.factors[row / kRowsTogether] >> 8 * (row % kRowsTogether));
}

// sums[n] += scale * (dot - zero point * sum of h). Both are integers below 2^24: their difference is exact.
template <typename E>
inline void AddDot(int32_t dot, const GroupScales<E>& group, int64_t n, const TokenHidden& h, float* sums) {
  const float zero = group.zeros == nullptr ? group.zero : static_cast<float>(group.zeros[n]);
  const float factor = ToFloat(group.scales, E::kType, n) * h.scale;
  const float value = static_cast<float>(dot) - zero * h.sum;
  sums[n] = Simd::Fma(factor, value, sums[n]);
}

template <typename E>
inline void AddColumnsOneByOne(const uint8_t* const* rows, int64_t count, int bits, const TokenHidden& h,
                               const GroupScales<E>& group, int64_t begin, int64_t end, float* sums) {
  for (int64_t n = begin; n < end; ++n) {
    int32_t dot = 0;
    for (int64_t i = 0; i < count; ++i) dot += QuantizedAt(rows[i], bits, n) * FactorOf(h, i);
    AddDot(dot, group, n, h, sums);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof

#if defined(__AVX512VNNI__)
#include "cpu/sparse_mlp/down_int8_vnni.h"
#elif defined(__AVX2__)
#include "cpu/sparse_mlp/down_int8_avx2.h"
#elif defined(STOF_NEON)
#include "cpu/sparse_mlp/down_int8_neon.h"
#else
namespace stof {
namespace cpu {
namespace {

template <typename E>
void AddOwnRows(const uint8_t* const* rows, int64_t count, int bits, const TokenHidden& h, const GroupScales<E>& group,
                int64_t begin, int64_t end, const NextGroup* next, float* sums) {
  (void)next;
  AddColumnsOneByOne(rows, count, bits, h, group, begin, end, sums);
}

// Nobody shares rows.
inline int64_t PackedColumns(int64_t, int) { return kInt8Step; }
inline void PackRows(const uint8_t* const*, int64_t, int, int64_t, int64_t, uint8_t*) {}
template <typename E>
void AddPacked(const uint8_t*, int64_t, int, const TokenHidden*, const uint8_t*, int64_t, const GroupScales<E>&,
               int64_t, int64_t, float*, int64_t) {}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif

#if defined(__AVX512VNNI__) || defined(STOF_NEON)
namespace stof {
namespace cpu {
namespace {

// Columns [begin, end) of sums: those of the token's own rows.
template <typename E>
void AddOwnRows(const uint8_t* const* own, int64_t count, int bits, const TokenHidden& h, const GroupScales<E>& group,
                int64_t begin, int64_t end, const NextGroup* next, float* sums) {
  const uint8_t* rows[kMostGroup + 3];
  Copy(own, own + count, rows);
  for (int64_t i = count; i % 4 != 0; ++i) rows[i] = rows[count - 1];  // their factors are 0
  const int64_t quads = (count + 3) / 4, whole = begin + (end - begin) / kInt8Step * kInt8Step;
  if (bits == 4) {
    AddOwnColumns<4>(rows, quads, h, group, begin, whole, next, sums);
  } else {
    AddOwnColumns<8>(rows, quads, h, group, begin, whole, next, sums);
  }
  AddColumnsOneByOne(own, count, bits, h, group, whole, end, sums);
}

// Columns of a copy: a multiple of kInt8Step.
inline int64_t PackedColumns(int64_t rows, int bits) {
  (void)bits;
  return Clamp(kPackedBytes / ((rows + 3) / 4 * 4) / kInt8Step * kInt8Step, kInt8Step, kInt8Columns);
}
static_assert(kInt8Step * kMostGroup <= 2 * kPackedBytes, "a copy holds the largest group");

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif

#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_VECTORS_H_
