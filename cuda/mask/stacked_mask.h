// SPDX-License-Identifier: Apache-2.0
// Masks by head for kernels that read a key once for all query heads of its group. Plain C++.
#ifndef STOF_CUDA_MASK_STACKED_MASK_H_
#define STOF_CUDA_MASK_STACKED_MASK_H_

#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// The mask of few queries and `group` heads a key head, group * S of at most mask.m, with the rows of a group's heads
// one below the other: row S * (h % group) + q is query q of head h. A tile of it is there where some head of the group
// has it, and full where all have the whole of it. Its heads are groups, H / group of them where the mask's differ;
// what is the same for all heads is given back as it is.
BlockMask StackHeads(const BlockMask& mask, int64_t group);

// Whether `groups` groups are done sooner one by one than their heads: by the tiles of the longest row of the stacked
// mask and of the other one. A group's tiles are never more than those of its heads together, but fewer CTAs share
// them.
bool StackingPays(int64_t stacked_tiles, int64_t tiles, int64_t group, int64_t groups, int multiprocessors);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_STACKED_MASK_H_
