// SPDX-License-Identifier: Apache-2.0
// Iterates over the KV tiles of a tile row, for the sm_80 and the fp32 kernel.
#ifndef STOF_CUDA_ATTENTION_TILE_ITERATOR_CUH_
#define STOF_CUDA_ATTENTION_TILE_ITERATOR_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

struct KvTile {
  int tile = -1;                 // -1: none is left
  int bits = -1;                 // index of its element mask; -1: every key
  uint32_t pad[2] = {~0u, ~0u};  // a bit for each key that exists and is not padding
};

// The first KV tile from entry *i on that padding does not empty; *i moves behind it. The tile row has the entries
// before `end`, those from `full` on without an element mask. pad: the packed padding of the batch, or nullptr.
// unmasked: all keys, whatever mask and padding say.
template <int kKeys>
__device__ __forceinline__ KvTile NextKvTile(const AttentionParams& p, const uint32_t* pad, int full, int end, int* i,
                                             bool unmasked) {
  KvTile next;
  while (*i < end) {
    const int at = (*i)++;
    if (p.has_mask != 0 && !unmasked) {
      next.tile = p.mask.key_tile[at];
      next.bits = at < full ? p.mask.bits_id[at] : -1;
    } else {
      next.tile = at;
    }
    if (pad != nullptr && !unmasked) {
      next.pad[0] = pad[2 * next.tile];
      next.pad[1] = pad[2 * next.tile + 1];
      if ((next.pad[0] | next.pad[1]) == 0) continue;
    } else if ((next.tile + 1) * kKeys > p.T) {
      const int keys = p.T - next.tile * kKeys;
      next.pad[0] = keys >= 32 ? ~0u : (1u << keys) - 1u;
      next.pad[1] = keys <= 32 ? 0u : (1u << (keys - 32)) - 1u;
    }
    return next;
  }
  next.tile = -1;
  return next;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_TILE_ITERATOR_CUH_
