// SPDX-License-Identifier: Apache-2.0
// The key columns of one KV head beside its key range (key_range.h), as a decode kernel walks them.
#ifndef STOF_CUDA_ATTENTION_DECODE_COLUMN_LIST_CUH_
#define STOF_CUDA_ATTENTION_DECODE_COLUMN_LIST_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/key_range.h"
#include "cuda/mask/device_columns.h"

namespace stof {
namespace cuda {

// Added to the index of an entry of 64 gathered columns, in the place of a KV tile.
constexpr int kGathered = 1 << 24;

struct ColumnList {
  ColumnEntries entries;
  const int32_t* list = nullptr;
  const uint32_t* words = nullptr;

  // Turns the KV tiles [*begin, *end) of the key range into the entries of columns and range.
  __device__ __forceinline__ void Find(const DeviceColumns& columns, int g, int* begin, int* end) {
    const int64_t own = columns.lists == 1 ? 0 : g;
    list = columns.list + own * columns.stride;
    words = columns.words + own * 2 * columns.tiles;
    const int below = __ldg(columns.below + own * (columns.tiles + 1) + *begin);
    entries = MakeColumnEntries(below, columns.gathers != 0, *begin);
    *end += entries.tiles - *begin;
    *begin = 0;
  }
  __device__ __forceinline__ int RangeTile(int entry) const { return entries.range_begin + entry - entries.tiles; }
  // The KV tile of an entry of columns, or kGathered + entry. bits: which of 32 keys from key `first` of it on count.
  __device__ __forceinline__ int ReadEntry(bool gathers, int entry, int first, uint32_t* bits) const {
    if (gathers) {
      *bits = BitsOfColumns(entries, entry, first);
      return entry + kGathered;
    }
    const int tile = __ldg(list + entry);
    *bits = BitsOfTile(tile, first);
    return tile;
  }
  // Which of 32 keys from key `first` of a KV tile on are columns.
  __device__ __forceinline__ uint32_t BitsOfTile(int tile, int first) const {
    return __ldg(words + 2 * tile + first / 32);
  }
  // The key at a place of a tile that ReadEntry gave. It has to be there.
  __device__ __forceinline__ int KeyAt(int tile, int place) const {
    return tile >= kGathered ? __ldg(list + (tile - kGathered) * kTileKeys + place) : tile * kTileKeys + place;
  }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_COLUMN_LIST_CUH_
