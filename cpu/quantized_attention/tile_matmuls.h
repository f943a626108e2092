// SPDX-License-Identifier: Apache-2.0
// The matmuls of a register block in tile registers (AMX): queries times keys, codes of weights times values. A row of
// a tile is 64 bytes: 16 words of a row of queries or weights, or a word of 16 columns as keys and values are packed.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_TILE_MATMULS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_TILE_MATMULS_H_

#include <cstdint>

#include "cpu/quantized_attention/scratch.h"
#include "cpu/simd/tiles.h"

namespace stof {
namespace cpu {
namespace {

// The products of Int8::kRows rows and the keys of a tile, zero points included: [kRows, keys].
inline void MultiplyTile(const QuantizedProblem& p, const RowScratch& s, int64_t head, int64_t tile, int64_t row,
                         uint64_t /*wanted*/, int32_t* products) {
  constexpr int kBlock = kTileKeys / kSumColumns;
  const int64_t at = head * p.key_tiles + tile, size = 4 * p.key_words;
  const int8_t* const keys = p.keys + at * kTileKeys * size;
  const int32_t* const key_sums = p.key_sums + at * kTileKeys;
  int32_t key_terms[kTileKeys];  // a local copy, so that the compiler knows it does not alias products
  Copy(key_sums, key_sums + kTileKeys, key_terms);
  const uint8_t* const queries = s.queries + row * size;
  STOF_STORE_FOR_TILES();
  ZeroSumTiles<kBlock>();
  int64_t d = 0;
  for (; d + kTileDepth <= size; d += kTileDepth) {
    AddTileProducts<kBlock>(queries + d, size, keys + d * kTileKeys, 4 * kTileKeys, 4 * kSumColumns);
  }
  if (d < size) AddLastTileProducts<kBlock>(queries + d, size, keys + d * kTileKeys, 4 * kTileKeys, 4 * kSumColumns);
  StoreSumTiles<kBlock>(products, 4 * kTileKeys, 4 * kSumColumns);
  for (int r = 0; r < Int8::kRows; ++r) {
    const int32_t row_term = s.row_terms[row + r];
    for (int k = 0; k < kTileKeys; ++k) products[r * kTileKeys + k] += key_terms[k] + row_term;
  }
}

// The sums of Int8::kRows rows of weights and kVectors blocks of 16 columns of values.
template <int kVectors>
class ValueSumsInTiles {
 public:
  ValueSumsInTiles() {
    STOF_STORE_FOR_TILES();
    ZeroSumTiles<kVectors>();
  }
  // The whole tile: forbidden keys have weights that add nothing.
  void AddTile(const uint8_t* codes, const StripTile& /*tile*/, const int8_t* values, int64_t stride) {
    AddTileProducts<kVectors>(codes, kTileKeys, values, stride, 4 * kSumColumns);
  }
  void Finish() { StoreSumTiles<kVectors>(sums_, 4 * kColumns, 4 * kSumColumns); }
  void StoreRow(int r, int32_t* to) const { Copy(sums_ + r * kColumns, sums_ + (r + 1) * kColumns, to); }

 private:
  static constexpr int kColumns = kVectors * kSumColumns;
  static_assert(kTileKeys == kTileDepth, "a tile of weights is a tile register");
  alignas(64) int32_t sums_[Int8::kRows * kColumns];
};

template <int kVectors>
using ValueSums = ValueSumsInTiles<kVectors>;

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_TILE_MATMULS_H_
