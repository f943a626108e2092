// SPDX-License-Identifier: Apache-2.0
// Which CTA of a persistent kernel takes which rows of a block mask: made with the mask, so that nothing is left to do
// at run time. Plain C++.
#ifndef STOF_CUDA_WORK_PLAN_H_
#define STOF_CUDA_WORK_PLAN_H_

#include <cstdint>
#include <vector>

#include "plugins/core/block_mask.h"

namespace stof {
namespace cuda {

struct WorkPlan {
  std::vector<int32_t> begin;  // [ctas + 1]: CTA c has items [begin[c], begin[c + 1])
  std::vector<int32_t> items;  // (b * H + h) * rows + row
};

// Longest processing time first (Graham 1969) within sections of `section` heads, whose keys and values fit the L2
// cache together; loads are carried from section to section. ctas and section are at least 1, B * H * rows fits an
// int32.
WorkPlan PlanWork(const BlockMask& mask, int64_t B, int64_t H, int ctas, int64_t section);

// The cost of a row of a table, in quarters of a full tile.
int64_t RowCost(const BlockMask& mask, int64_t table, int64_t row);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_WORK_PLAN_H_
