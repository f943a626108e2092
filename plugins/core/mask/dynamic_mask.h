// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_MASK_DYNAMIC_MASK_H_
#define STOF_PLUGINS_CORE_MASK_DYNAMIC_MASK_H_

#include <cstdint>

namespace stof {

// Adjacent key tiles [first, last). Full: all keys of them that exist are allowed. Else some may be.
struct KeyTileRun {
  int32_t first = 0, last = 0;
  bool is_full = false;
};

// A conjunct of the mask that is evaluated while a kernel runs.
struct DynamicMask {
  // Returns 0: the tile is empty, 1: partial and bits [m, n / 32] hold its element mask, 2: full.
  int (*tile)(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
              uint32_t* bits) = nullptr;
  const void* self = nullptr;
  // Whether it differs between batches, between heads.
  bool by_batch = true, by_head = true;
  // Lists the tiles of n keys in [first, last) in which one of the rows [row0, row0 + m) may attend a key, ascending
  // and at most last - first runs; returns their number. Takes time by the number of runs, not by that of tiles.
  int64_t (*runs)(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                  KeyTileRun* runs) = nullptr;
  // by_head: heads i * alike_heads to (i + 1) * alike_heads - 1 have one mask. It divides H / G.
  int64_t alike_heads = 1;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_DYNAMIC_MASK_H_
