// SPDX-License-Identifier: Apache-2.0
// The pages of the keys that a warp of the split-KV kernel loads: groups of 16 keys, each of which lies on one page.
#ifndef STOF_CUDA_ATTENTION_DECODE_WARP_PAGES_CUH_
#define STOF_CUDA_ATTENTION_DECODE_WARP_PAGES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/attention/decode/common.cuh"
#include "plugins/core/contract/attention.h"

namespace stof {
namespace cuda {

template <int kGroups>
struct WarpPages {
  int page[kGroups];  // not set where keys are not in pages

  // Looks up the groups from `first_key` on of a sequence that has `keys` keys, in row `row` of the table. Entries
  // outside of the cache, and groups behind the keys, give page 0. kIsFresh: the previous kernel has written the table.
  template <bool kIsFresh>
  __device__ __forceinline__ void Find(const KeyPages& pages, int row, int first_key, int keys) {
    const int32_t* const table = pages.table + row * pages.columns;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int key = first_key + 16 * g;
      int found = 0;
      if (key < keys) found = kIsFresh ? ReadWord(table + (key >> pages.shift)) : __ldg(table + (key >> pages.shift));
      page[g] = found >= 0 && found < pages.pages ? found : 0;
    }
  }

  // The row of a key of a group, where pages lie one behind the other in a cache.
  __device__ __forceinline__ int RowOf(const KeyPages& pages, int group, int key) const {
    return (page[group] << pages.shift) + (key & ((1 << pages.shift) - 1));
  }

  // Elements from row 0 of page 0 to the row of a key of a group.
  __device__ __forceinline__ int64_t OffsetOf(const KeyPages& pages, int group, int key, int64_t stride) const {
    return page[group] * pages.stride + (key & ((1 << pages.shift) - 1)) * stride;
  }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_WARP_PAGES_CUH_
