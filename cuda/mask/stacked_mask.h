// SPDX-License-Identifier: Apache-2.0
// Masks for GQA packing: kernels read a key once for all query heads of its group. Plain C++.
#ifndef STOF_CUDA_MASK_STACKED_MASK_H_
#define STOF_CUDA_MASK_STACKED_MASK_H_

#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// The mask for GQA packing: the rows of a group's heads are stacked in one tile, row S * (h % group) + q is query q of
// head h. group * S is at most mask.m. A tile is present where some head of the group has it, and full where all heads
// have it full. The result has H / group heads; a mask that is the same for all heads is returned unchanged.
BlockMask StackHeads(const BlockMask& mask, int64_t group);

// Whether stacking is faster, by the tiles of the longest row of the stacked mask and of the other one. A group never
// has more tiles than its heads together, but fewer CTAs share them.
bool StackingPays(int64_t stacked_tiles, int64_t tiles, int64_t group, int64_t groups, int sm_count);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_STACKED_MASK_H_
