// SPDX-License-Identifier: Apache-2.0
// A mask at tile granularity: the one form that every kernel reads.
#ifndef STOF_PLUGINS_CORE_MASK_BLOCK_MASK_H_
#define STOF_PLUGINS_CORE_MASK_BLOCK_MASK_H_

#include <cstdint>
#include <vector>

namespace stof {

struct BlockMask {
  int64_t S = 0, T = 0, P = 0;
  int32_t m = 0, n = 0;                // tile: m query rows × n keys; n is a multiple of 32
  int32_t rows = 0;                    // ceil(S / m) tile rows of one table
  int32_t layout_b = 1, layout_h = 1;  // 1, or B and H where batches and heads differ
  std::vector<int32_t> layout;         // [layout_b, layout_h] -> table
  std::vector<int32_t> row_ptr;        // [tables * rows + 1]; row r of table t is row t * rows + r
  std::vector<int32_t> full_begin;  // [tables * rows]: entries [row_ptr[r], full_begin[r]) are partial, the rest full
  std::vector<int32_t> key_tile;    // [nnz] ascending among the partial and among the full ones of a row
  std::vector<int32_t> bits_id;     // [nnz] index into bits; -1 for full tiles, and for partial ones without bits
  std::vector<uint32_t> bits;       // [distinct, m, n / 32]; bit j of word w: key 32 w + j. Beyond S or T: 0
  // Partial tiles without bits, which the reader of the mask evaluates: 0 unless BlockMaskBounds::leaves_tiles. They
  // may turn out empty or full. Tables that differ in such tiles alone are stored once.
  int64_t left = 0;
  // A tile that reaches beyond T is partial; one that only reaches beyond S is full if its rows below S are.

  int32_t TableOf(int64_t b, int64_t h) const {
    return layout[(layout_b == 1 ? 0 : b) * layout_h + (layout_h == 1 ? 0 : h)];
  }
  int64_t Bytes() const {
    return static_cast<int64_t>(sizeof(*this)) +
           4 * static_cast<int64_t>(layout.size() + row_ptr.size() + full_begin.size() + key_tile.size() +
                                    bits_id.size() + bits.size());
  }
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_BLOCK_MASK_H_
