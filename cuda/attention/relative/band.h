// SPDX-License-Identifier: Apache-2.0
// Where the products of queries or keys and rows of a table lie for the sm80 kernels, where the row is a function of
// the distance of key and query. Plain C++, for the host and the device.
//
// A first kernel expands the table: expanded row j - i + padded queries is the row of query i and key j. So the rows of
// 16 queries and 64 keys are a band of 80, whose products mma.sync makes in registers; query r and key c read column
// c - r + 16 of it. This skew is at most two blocks of 8 columns: lanes exchange their elements by shuffles.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_BAND_H_
#define STOF_CUDA_ATTENTION_RELATIVE_BAND_H_

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/mask/mask_params.h"

namespace stof {
namespace cuda {

constexpr int kBandQueries = 16;                     // of a band
constexpr int kBandRows = kTileKeys + kBandQueries;  // expanded rows of a band
constexpr int kBandPairs = kBandRows / 16;           // pairs of blocks of 8 rows

// ---- the expanded table ----
// Queries are padded to whole tiles, so that no row of a tile needs a bounds check.
STOF_HD constexpr int PaddedQueries(int queries) { return (queries + kTileRows - 1) / kTileRows * kTileRows; }
STOF_HD constexpr int PaddedKeys(int keys) { return (keys + kTileKeys - 1) / kTileKeys * kTileKeys; }
// Row 0 is of no pair.
STOF_HD constexpr int64_t ExpandedRows(int queries, int keys) {
  return int64_t{PaddedQueries(queries)} + PaddedKeys(keys);
}
STOF_HD constexpr int ExpandedRow(int query, int key, int queries) { return key - query + PaddedQueries(queries); }
// The first expanded row of the band of queries from `query` on and keys from `key` on: a multiple of 16, where
// `query` and `key` are.
STOF_HD constexpr int BandBegin(int query, int key, int queries) {
  return ExpandedRow(query + kBandQueries, key, queries);
}

// Expanded rows are stored as operands of mma.sync.m16n8k16, 16 bytes a lane. Products of queries have them as the
// right operand: [heads, blocks of 8 rows, pairs of k-steps, 32 lanes, 8 elements]. Lane 4 g + t has elements of row g
// of the block.
STOF_HD constexpr int FragmentRow(int lane) { return lane / 4; }
// The column of the row, within the 32 of a pair of k-steps, that element i of a lane is.
STOF_HD constexpr int FragmentColumn(int lane, int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; }
// Fragments of a lane in front of those of a block, pairs of k-steps: head size / 32.
STOF_HD constexpr int64_t FragmentIndex(int64_t block, int pair, int pairs, int lane) {
  return (block * pairs + pair) * 32 + lane;
}
// Products of keys have them as the left operand, in 16 bits: [heads, blocks of 16 rows, k-steps, 32 lanes, 8
// elements]. Both orders have the same fragments a row: that of k-step k of block b is FragmentIndex(2 b, k, pairs,
// lane).
STOF_HD constexpr int LeftFragmentRow(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
STOF_HD constexpr int LeftFragmentColumn(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// ---- rings in shared memory ----
// Rows of neighbouring tiles overlap: a ring of kPairs pairs of blocks has row r in pair r / 16 % kPairs.
template <int kPairs>
STOF_HD constexpr uint32_t RingPair(int row) {
  return static_cast<uint32_t>(row) / kBandQueries % kPairs;
}
// The same pair, of one that is less than 2 kPairs.
template <int kPairs>
STOF_HD constexpr uint32_t NextInRing(uint32_t pair) {
  if ((kPairs & (kPairs - 1)) == 0) return pair & (kPairs - 1);
  return pair < kPairs ? pair : pair - kPairs;
}

// ---- products of queries: accumulators have queries as rows and expanded rows as columns ----
// Lane 4 g + t has columns 2 t and 2 t + 1 of rows g and g + 8. For block j of 8 keys, row g + 8 reads blocks j and j +
// 1 of the band, row g reads blocks j + 1 and j + 2: 8 - g columns behind the first column of the first of the two.
struct QuerySkew {
  STOF_HD explicit constexpr QuerySkew(int lane)
      : is_swapped(lane / 4 % 2 != 0),
        takes_next{lane % 4 * 2 + (is_swapped ? 1 : 0) < 8 - lane / 4,
                   lane % 4 * 2 + (is_swapped ? 0 : 1) < 8 - lane / 4},
        source{Source(lane, 0), Source(lane, 1)} {}
  // Swaps the two columns of a lane where rows are shifted by an odd number. Once for each row of a block.
  STOF_HD constexpr void Order(float* x, float* y) const {
    const float first = *x;
    *x = is_swapped ? *y : first;
    *y = is_swapped ? first : *y;
  }
  // What a lane sends for element e (0 or 1) of a block of keys, of its ordered columns of the first block and the next
  // one.
  STOF_HD constexpr float Send(int e, float first, float next) const { return takes_next[e] ? next : first; }

  bool is_swapped;
  bool takes_next[2];
  int source[2];  // the lane that sends element e

 private:
  STOF_HD static constexpr int Source(int lane, int e) {
    return (lane & ~3) | ((lane % 4 * 2 + e + 8 - lane / 4) / 2 & 3);
  }
};

// ---- products of keys: accumulators have expanded rows as rows and keys as columns ----
// For block j of 8 keys, query g + 8 reads rows of blocks j and j + 1 of the band, query g of blocks j + 1 and j + 2.
struct KeySkew {
  STOF_HD explicit constexpr KeySkew(int lane)
      : takes_next{lane / 4 <= lane % 4 * 2, lane / 4 <= lane % 4 * 2 + 1}, source{Source(lane, 0), Source(lane, 1)} {}
  STOF_HD constexpr float Send(int e, float first, float next) const { return takes_next[e] ? next : first; }

  bool takes_next[2];
  int source[2];

 private:
  STOF_HD static constexpr int Source(int lane, int e) { return ((lane % 4 * 2 + e - lane / 4) & 7) * 4 + lane % 4; }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_BAND_H_
