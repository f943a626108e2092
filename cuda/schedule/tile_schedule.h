// SPDX-License-Identifier: Apache-2.0
// Which CTA of a persistent kernel takes which rows of a block mask: made with the mask, so that nothing is left to do
// at run time. Plain C++.
#ifndef STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_
#define STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_

#include <cstdint>
#include <vector>

#include "cuda/common/host_device.h"
#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// What a kernel's worker needs for a row of tiles beside its tiles, and for a tile without and with bits, in
// nanoseconds; `split` tiles at the same time. reread: beside all rows, for every MiB of the problem's keys and values,
// where they come from memory more than once. cuts: workers can take parts of a row, which are joined behind them.
// half: what one of a row's two groups of 64 queries takes alone, in percent of a row with its tiles; 0: workers take
// both. draws: workers can draw rows at run time. teams: workers that share a multiprocessor. alone: how fast one of
// these is that has it to itself, in percent of one that shares it with all the others.
struct TileCost {
  int64_t row = 1, full = 1, partial = 1, split = 1, reread = 0;
  bool cuts = false;
  int64_t half = 0;
  bool draws = false;
  int teams = 1;
  int64_t alone = 100;
};

// One row of tiles of one head: entries [begin, end) of the mask, those from `full` on without bits. In a plan, whose
// entries say of each whether it has bits, `full` is `end`, and for a part of a row, or a half, `end + 1` and its
// number.
struct WorkItem {
  int32_t item;  // (b * H + h) * rows + row
  int32_t begin, full, end;
};
// Which part of a row an item is, counted from 0 in the whole plan, or which of its two groups; negative: a row.
STOF_EVERYWHERE inline int32_t PartOf(const WorkItem& work) { return work.full - work.end - 1; }

// A row in parts.
struct CutRow {
  int32_t item;
  int32_t first, count;  // parts [first, first + count)
};

// The entry of its tile i, as kernels walk them without a plan: a full one comes first, for nothing covers the first
// tile's softmax, and bits take time.
STOF_EVERYWHERE inline int32_t EntryAt(const WorkItem& work, int32_t i) {
  if (work.begin == work.full || work.full >= work.end) return work.begin + i;
  return i == 0 ? work.end - 1 : work.begin + i - 1;
}

// What a walk says of an entry: -1 for a full tile, else which bits it has, and which groups of 64 query rows have no
// pair in it and in none before it, or in none behind it. Such a group is passed over it at the start or end of its
// row.
constexpr int kIdBits = 22, kMostGroups = 4;
constexpr int32_t kIdMask = (int32_t{1} << kIdBits) - 1;
STOF_EVERYWHERE inline int32_t LeadOf(int32_t code) { return code < 0 ? 0 : code >> kIdBits & 15; }
STOF_EVERYWHERE inline int32_t TrailOf(int32_t code) { return code < 0 ? 0 : code >> (kIdBits + kMostGroups) & 15; }

// The entries of a mask in the order in which kernels with a plan walk each row's: tiles of the first groups alone, a
// full one, partial ones of all, the other full ones, tiles of the last groups alone. A diagonal band gives each group
// one piece of its row.
struct Walk {
  std::vector<int32_t> key_tile, code;  // [nnz]
  std::vector<int32_t> missing;         // [tables * rows]: groups without a pair in a tile, of all tiles of the row
};
Walk WalkOf(const BlockMask& mask);

constexpr int kFirstTiles = 4;

// All that a worker's start needs, in one place, for a short problem takes as long as its chain of loads.
struct alignas(64) WorkStart {
  WorkItem first;                                // that of `begin`, if there is one
  int32_t begin, end;                            // its items
  int32_t tile[kFirstTiles], code[kFirstTiles];  // of the first tiles of `first`; tile -1 beyond its end
};

struct WorkPlan {
  std::vector<int32_t> begin;   // [workers + 1]: worker w has items [begin[w], begin[w + 1])
  std::vector<WorkItem> items;  // behind those of all workers, the ones that are nobody's
  std::vector<CutRow> cut;
  // Nanoseconds of the worker that has most to do, what is drawn among it as it would be dealt out, and of what joins
  // parts; before workers of one multiprocessor change rows with others.
  int64_t longest = 0;
  int64_t mean = 0;  // of workers that have rows, before these are cut or halved
  int workers() const { return static_cast<int>(begin.size()) - 1; }
  // Items that workers draw at run time, in this order, when they are done with their own. Where there are some, each
  // worker has one of its own, and no row is in halves.
  int64_t drawn() const { return begin.empty() ? 0 : static_cast<int64_t>(items.size()) - begin.back(); }
  int64_t parts() const { return cut.empty() ? 0 : cut.back().first + cut.back().count; }
};
// Parts of a plan at most, each of so many entries at least: what memory has to be there for them follows.
constexpr int64_t kMostParts = 512, kFewestTilesOfPart = 4;
// Of one row.
constexpr int64_t kMostPartsOfRow = 32;

// Whether so many rows are all halved where there is no plan: when there is a worker for every half.
constexpr bool AreHalved(const TileCost& cost, int64_t rows, int workers) {
  return cost.half > 0 && 2 * rows <= workers;
}

// Of 64 rows, for heads up to this size: outputs, maxima and sums.
constexpr int64_t PartBytes(int64_t head_size) { return 64 * (4 * head_size + 8); }

// Whether a plan is worth its time: beyond a million items chance balances. A walk also has to name all bits.
bool IsPlanned(const BlockMask& mask, int64_t B, int64_t H);

// Longest processing time first (Graham 1969) within sections of up to `section` heads, whose keys and values fit the
// L2 cache together, then the smallest rows of all. Rows that would be the end of the run come in an earlier section
// than their head's; loads are carried on. Where that comes out uneven, as many equal rows do, some are halved, if the
// kernel can. workers and section are at least 1, B * H * rows fits an int32.
// sharing: query heads of a key head.
// finish: for a run and not for a prediction (kernels' costs were measured on plans as dealt). Where few rows of every
// head walk all keys and the others are a band, heads whose others take as long as such a row go along with it, in the
// order of their keys, so that these come from memory once (where the L2 cache does not hold all, each head has keys of
// its own, and the plan ends hardly later). Of eight rows a worker and more, where the kernel can and they are short,
// those that come last, an eighth of the time, are left to be drawn, for multiprocessors differ by some percent in
// speed. Else (of up to 8192 rows) workers change some of a section with each other until the busiest has hardly more
// than the mean, instead of 1 to 2 % as random masks have it; those that share a multiprocessor also with three rows
// each, busy ones share it with less busy ones, and multiprocessors come out even. Where workers that share none change
// rows or draw them the smallest rows of all stay with their heads, if that ends hardly later.
WorkPlan PlanWork(const BlockMask& mask, const Walk& walk, int64_t B, int64_t H, int workers, int64_t section,
                  const TileCost& cost, bool finish = false, int64_t sharing = 1);

// Nanoseconds that a plan takes: what its busiest worker has to do, but where workers share a multiprocessor that one
// is faster when the others are done, so that what counts is the mean, unless it has so much more than they do. For the
// choice among kernels; to even a plan out each multiprocessor is looked at by itself (cuda/schedule/rebalance.h).
int64_t TimeOf(const WorkPlan& plan, const TileCost& cost);

// Nanoseconds that no such plan takes less than: found without dealing anything out.
int64_t LeastOfPlan(const BlockMask& mask, int64_t B, int64_t H, int workers, const TileCost& cost);

// A start for each worker of a plan of a mask with that walk.
std::vector<WorkStart> StartsOf(const WorkPlan& plan, const Walk& walk);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_
