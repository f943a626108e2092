// SPDX-License-Identifier: Apache-2.0
// Which key tiles some rows visit, in which order: those of the block mask, or the runs that the mask lists.
#ifndef STOF_CPU_ATTENTION_TILE_ORDER_H_
#define STOF_CPU_ATTENTION_TILE_ORDER_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"

namespace stof {
namespace cpu {
namespace {

// Key tiles [first, last) that the mask keeps: partial ones first, where it has blocks. unmasked: all of them.
template <bool kInPlace>
inline void AttentionWorker<kInPlace>::AttendRange(int64_t first, int64_t last, bool unmasked) {
  const bool has_mask = args_.mask.fixed.blocks() != nullptr;
  if (!has_mask && !unmasked && scratch_.has_runs) return AttendRuns(first, last);
  if (!has_mask || unmasked) {
    for (int64_t tile = first; tile < last; ++tile) {
      const uint32_t* bits = nullptr;
      next_ = tile + 1 < last ? tile + 1 : -1;
      if (args_.mask.fixed.elements() == nullptr || unmasked || FindElements(tile, &bits)) Tile(tile, bits, unmasked);
    }
    return;
  }
  const int64_t row = MaskRow(b_, h_, row0_);
  const BlockMaskArrays& mask = problem_.mask;
  const int32_t* tiles = mask.key_tile;
  const int64_t words = static_cast<int64_t>(problem_.m) * (problem_.n / 32);
  const int64_t full = mask.full_begin[row], end = mask.row_ptr[row + 1];
  for (int64_t i = LowerBound(tiles, mask.row_ptr[row], full, first); i < full && tiles[i] < last; ++i) {
    const uint32_t* bits = nullptr;
    next_ = i + 1 < full && tiles[i + 1] < last ? int64_t{tiles[i + 1]} : -1;
    if (mask.bits_id[i] >= 0) {
      bits = mask.bits + mask.bits_id[i] * words;
    } else if (!FindElements(tiles[i], &bits)) {
      continue;
    }
    Tile(tiles[i], bits, false);
  }
  for (int64_t i = LowerBound(tiles, full, end, first); i < end && tiles[i] < last; ++i) {
    next_ = i + 1 < end && tiles[i + 1] < last ? int64_t{tiles[i + 1]} : -1;
    Tile(tiles[i], nullptr, false);
  }
}

// The runs of the rows, of which only tiles in [first, last) count.
template <bool kInPlace>
inline const KeyTileRun* AttentionWorker<kInPlace>::FindRuns(int64_t first, int64_t last, int64_t* count) const {
  if (problem_.runs == nullptr) {
    const DynamicMask& elements = *args_.mask.fixed.elements();
    *count = elements.runs(elements.self, b_, h_, row0_, problem_.m, problem_.n, first, last, scratch_.runs);
    return scratch_.runs;
  }
  const int64_t list = b_ * problem_.run_lists + (problem_.run_lists == 1 ? 0 : g_);
  const int64_t end = problem_.run_begin[list + 1];
  int64_t low = problem_.run_begin[list], high = end;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (problem_.runs[middle].last <= first) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (high = low; high < end && problem_.runs[high].first < last;) ++high;
  *count = high - low;
  return problem_.runs + low;
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::AttendRuns(int64_t first, int64_t last) {
  if (first >= last) return;
  int64_t count = 0;
  const KeyTileRun* const runs = FindRuns(first, last, &count);
  for (int64_t i = 0; i < count; ++i) {
    const KeyTileRun run = {static_cast<int32_t>(runs[i].first < first ? first : runs[i].first),
                            static_cast<int32_t>(Min(runs[i].last, last)), runs[i].is_full};
    for (int64_t tile = run.first; tile < run.last; ++tile) {
      const uint32_t* bits = nullptr;
      next_ = tile + 1 < run.last ? tile + 1 : i + 1 < count ? int64_t{runs[i + 1].first} : -1;
      if (run.is_full || FindElements(tile, &bits)) Tile(tile, bits, false);
    }
  }
}

// The key tiles at the positions of the rows: queries are the last of the keys' positions. Scores of neighbours are
// often large, so that a row that begins with them can skip more of the others.
template <bool kInPlace>
inline void AttentionWorker<kInPlace>::OwnTiles(int64_t* first, int64_t* last) const {
  const int64_t position = key_end_ - EndOfQueries(args_, b_) + row0_, n = problem_.n;
  *first = position < 0 ? 0 : position / n;
  *last = position + queries_ <= 0 ? 0 : (position + queries_ - 1) / n + 1;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_TILE_ORDER_H_
