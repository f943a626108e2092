// SPDX-License-Identifier: Apache-2.0
// Which CTA of a persistent kernel takes which rows of a block mask: made with the mask, so that nothing is left to do
// at run time. Plain C++.
#ifndef STOF_CUDA_WORK_PLAN_H_
#define STOF_CUDA_WORK_PLAN_H_

#include <cstdint>
#include <vector>

#include "cuda/everywhere.h"
#include "plugins/core/block_mask.h"

namespace stof {
namespace cuda {

// What a kernel's worker needs for a row of tiles beside its tiles, and for a tile without and with bits, in
// nanoseconds; `split` tiles at the same time. reread: beside all rows, for every MiB of the problem's keys and values,
// where they come from memory more than once.
struct TileCost {
  int64_t row = 1, full = 1, partial = 1, split = 1, reread = 0;
};

// One row of tiles of one head: entries [begin, end) of the mask, those from `full` on without bits.
struct WorkItem {
  int32_t item;  // (b * H + h) * rows + row
  int32_t begin, full, end;
};

// The entry of its tile i, as kernels walk them: a full one comes first, for nothing covers the first tile's softmax,
// and bits take time.
STOF_EVERYWHERE inline int32_t EntryAt(const WorkItem& work, int32_t i) {
  if (work.begin == work.full || work.full == work.end) return work.begin + i;
  return i == 0 ? work.end - 1 : work.begin + i - 1;
}

constexpr int kFirstTiles = 4;

// All that a worker's start needs, in one place, for a short problem takes as long as its chain of loads.
struct alignas(64) WorkStart {
  WorkItem first;                                // that of `begin`, if there is one
  int32_t begin, end;                            // its items
  int32_t tile[kFirstTiles], code[kFirstTiles];  // of the first tiles of `first`; tile -1 beyond its end
};

struct WorkPlan {
  std::vector<int32_t> begin;  // [workers + 1]: worker w has items [begin[w], begin[w + 1])
  std::vector<WorkItem> items;
  int64_t longest = 0;  // nanoseconds of the worker that has most to do
};

// Whether a plan is worth its time: beyond a million items chance balances.
bool IsPlanned(const BlockMask& mask, int64_t B, int64_t H);

// Longest processing time first (Graham 1969): large rows, then sections of `section` heads, whose keys and values fit
// the L2 cache together; loads are carried on. workers and section are at least 1, B * H * rows fits an int32.
WorkPlan PlanWork(const BlockMask& mask, int64_t B, int64_t H, int workers, int64_t section, const TileCost& cost);

// A start for each worker of a plan of that mask.
std::vector<WorkStart> StartsOf(const WorkPlan& plan, const BlockMask& mask);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_WORK_PLAN_H_
