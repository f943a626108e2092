// SPDX-License-Identifier: Apache-2.0
// Key range: the keys of a KV cache that the queries of a sequence attend, which only the device knows. Shared by the
// kernels and the host's tests.
#ifndef STOF_CUDA_ATTENTION_DECODE_KEY_RANGE_H_
#define STOF_CUDA_ATTENTION_DECODE_KEY_RANGE_H_

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/mask/mask_params.h"

namespace stof {
namespace cuda {

constexpr int32_t kNoWindow = 1 << 28;  // a window_left beyond every key

// Query i attends the keys from Low(i) to first + i, of T keys.
struct KeyRange {
  int32_t first = 0, window_left = kNoWindow;
  int32_t block = 1;  // the window begins window_left keys before the query's block of so many positions

  // The first key that query i attends; negative: all keys up to it.
  STOF_HD int32_t Low(int32_t i) const {
    const int32_t position = first + i;
    return position - window_left - (block > 1 && position > 0 ? position % block : 0);
  }
};

// first_row may be any number: it is clamped far outside of the keys, where no result depends on it.
STOF_HD inline KeyRange MakeKeyRange(int32_t first_row, int32_t window_left, int32_t T, int32_t block = 1) {
  KeyRange range;
  range.block = block;
  range.first = first_row < -kNoWindow ? -kNoWindow : first_row > T + kNoWindow ? T + kNoWindow : first_row;
  range.window_left = window_left;
  return range;
}

// The first key behind those of all queries. From there on a cache may hold anything, NaN included.
STOF_HD inline int32_t EndOfKeys(const KeyRange& range, int32_t S, int32_t T) {
  const int32_t end = range.first + S;
  return end < 0 ? 0 : end > T ? T : end;
}

// Finds the KV tiles [begin, end) that hold all keys of S queries.
STOF_HD inline void FindTiles(const KeyRange& range, int32_t S, int32_t T, int32_t* begin, int32_t* end) {
  const int32_t low = range.Low(0);
  *begin = (low < 0 ? 0 : low > T ? T : low) / kTileKeys;
  *end = (EndOfKeys(range, S, T) + kTileKeys - 1) / kTileKeys;
  if (*end < *begin) *end = *begin;
}

// Whether every query attends every key of the tile.
STOF_HD inline bool IsFullTile(const KeyRange& range, int32_t S, int32_t tile) {
  const int32_t key = tile * kTileKeys;
  return key + kTileKeys - 1 <= range.first && key >= range.Low(S - 1);
}

// The element mask of 32 keys. Bit i: the query attends key + i.
STOF_HD inline uint32_t BitsOfKeys(const KeyRange& range, int32_t query, int32_t key) {
  const int32_t high = range.first + query - key, low = range.Low(query) - key;
  const uint32_t up_to = high < 0 ? 0u : high >= 31 ? ~0u : (2u << high) - 1u;
  const uint32_t from = low <= 0 ? ~0u : low >= 32 ? 0u : ~0u << low;
  return up_to & from;
}

// Of 32 keys those up to the query's own position.
STOF_HD inline uint32_t BitsUpToQuery(const KeyRange& range, int32_t query, int32_t key) {
  const int32_t high = range.first + query - key;
  return high < 0 ? 0u : high >= 31 ? ~0u : (2u << high) - 1u;
}

// Beside the range, queries attend key columns before them. A split walks entries: first the columns that lie before
// the KV tiles of the range, 64 gathered ones or one KV tile an entry, then the KV tiles of the range.
struct ColumnEntries {
  int32_t columns = 0;      // list entries before the range
  int32_t tiles = 0;        // entries for them
  int32_t range_begin = 0;  // the first KV tile of the range
};
STOF_HD inline ColumnEntries MakeColumnEntries(int32_t below, bool gathers, int32_t range_begin) {
  return {below, gathers ? (below + kTileKeys - 1) / kTileKeys : below, range_begin};
}
// Bits of the `count` columns of a gathered entry from column `first` of it on, 32 at most.
STOF_HD inline uint32_t BitsOfColumns(const ColumnEntries& entries, int32_t entry, int32_t first) {
  const int32_t left = entries.columns - entry * kTileKeys - first;
  return left >= 32 ? ~0u : left <= 0 ? 0u : (1u << left) - 1u;
}

// The most KV tiles that the range of S queries may take.
inline int64_t MostTiles(int64_t window_left, int64_t S, int64_t T, int64_t block = 1) {
  const int64_t all = (T + kTileKeys - 1) / kTileKeys;
  if (window_left < 0) return all;
  const int64_t keys = window_left + block - 1 + S;  // they begin at any key of a tile
  const int64_t most = (keys + kTileKeys - 2) / kTileKeys + 1;
  return most < all ? most : all;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_KEY_RANGE_H_
