// SPDX-License-Identifier: Apache-2.0
// The matmuls of a register block in vectors: queries times keys, codes of weights times values.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_VECTOR_MATMULS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_VECTOR_MATMULS_H_

#include <cstdint>

#include "cpu/quantized_attention/byte_rows.h"
#include "cpu/quantized_attention/products.h"
#include "cpu/quantized_attention/scratch.h"

namespace stof {
namespace cpu {
namespace {

template <int kVectors>
struct SumBlock {
  Int8::Sums of[Int8::kRows][kVectors];
  __attribute__((always_inline)) void Clear() {
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) of[r][v] = Int8::Set1(0);
    }
  }
};

// Adds products of Int8::kRows rows and columns, over their words. Rows lie row_stride bytes apart, the words of
// columns word_stride.
template <typename Products, int kVectors>
inline __attribute__((always_inline)) void AddProducts(const uint8_t* rows, int64_t row_stride, const int8_t* columns,
                                                       int64_t word_stride, int64_t words, SumBlock<kVectors>* sums) {
  for (int64_t w = 0; w < words; ++w) {
    typename Products::Columns loaded[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      loaded[v] = Products::LoadColumns(columns + w * word_stride + v * 4 * Int8::kLanes);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
      const typename Products::Row row = Products::LoadRow(rows + r * row_stride + 4 * w);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums->of[r][v] = Products::Dot(sums->of[r][v], row, loaded[v]);
    }
  }
}

// The products of Int8::kRows rows and the keys of a tile, zero points included: [kRows, keys]. Vectors without a key
// of `wanted` keep what they have.
inline void MultiplyTile(const QuantizedProblem& p, const RowScratch& s, int64_t head, int64_t tile, int64_t row,
                         uint64_t wanted, int32_t* products) {
  constexpr int kBlock = Int8::kVectors * Int8::kLanes;
  const int64_t at = head * p.key_tiles + tile, size = 4 * p.key_words;
  const int8_t* const keys = p.keys + at * kTileKeys * size;
  const int32_t* const key_terms = p.key_sums + at * kTileKeys;
  constexpr uint64_t kBlockBits = ~uint64_t{0} >> (kTileKeys - kBlock);
  for (int c = 0; c < kTileKeys; c += kBlock) {
    if ((wanted >> c & kBlockBits) == 0) continue;
    SumBlock<Int8::kVectors> sums;
#pragma GCC unroll 4
    for (int v = 0; v < Int8::kVectors; ++v) {
      const Int8::Sums terms = Int8::Load(key_terms + c + v * Int8::kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < Int8::kRows; ++r) sums.of[r][v] = Int8::Add(terms, Int8::Set1(s.row_terms[row + r]));
    }
    AddProducts<KeyProducts>(s.queries + row * size, size, keys + 4 * c, kTileKeys * 4, p.key_words, &sums);
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Int8::kVectors; ++v) {
        Int8::Store(products + r * kTileKeys + c + v * Int8::kLanes, sums.of[r][v]);
      }
    }
  }
}

// The sums of a register block of Int8::kRows rows of weights and kVectors vectors of columns of values.
template <int kVectors>
class ValueSumsInVectors {
 public:
  __attribute__((always_inline)) ValueSumsInVectors() {
    sums_.Clear();
#if defined(STOF_HAS_SHORT_PRODUCTS)
    shorts_.Clear();
#endif
  }
  __attribute__((always_inline)) void AddTile(const uint8_t* codes, const StripTile& tile, const int8_t* values,
                                              int64_t stride) {
    codes += 4 * tile.first;
    values += tile.first * stride;
#if defined(STOF_HAS_SHORT_PRODUCTS)
    if (tile.lane_sum <= kMostLaneSum) {
      if (lane_sum_ + tile.lane_sum > kMostLaneSum) Widen();
      lane_sum_ += tile.lane_sum;
      AddProducts<ShortProducts>(codes, kTileKeys, values, stride, tile.words, &shorts_);
      return;
    }
#endif
    AddProducts<ByteProducts>(codes, kTileKeys, values, stride, tile.words, &sums_);
  }
  // Ends the sums; StoreRow stores those of a row.
  __attribute__((always_inline)) void Finish() {
#if defined(STOF_HAS_SHORT_PRODUCTS)
    Widen();
#endif
  }
  __attribute__((always_inline)) void StoreRow(int r, int32_t* to) const {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) Int8::Store(to + v * Int8::kLanes, sums_.of[r][v]);
  }

 private:
  SumBlock<kVectors> sums_;
#if defined(STOF_HAS_SHORT_PRODUCTS)
  __attribute__((always_inline)) void Widen() {
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums_.of[r][v] = Int8::Add(sums_.of[r][v], ShortProducts::Widen(shorts_.of[r][v]));
      }
    }
    shorts_.Clear();
    lane_sum_ = 0;
  }
  SumBlock<kVectors> shorts_;
  int32_t lane_sum_ = 0;  // of tiles in shorts_
#endif
};

template <int kVectors>
using ValueSums = ValueSumsInVectors<kVectors>;

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_VECTOR_MATMULS_H_
