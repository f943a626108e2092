// SPDX-License-Identifier: Apache-2.0
// Static tile schedule of a persistent kernel: which CTA computes which tile rows of a block mask. The host makes it
// together with the mask, so that a run has nothing left to decide. Plain C++.
//
//   tile row       m queries of one head with all their KV tiles: a row of the block mask
//   work tile      what a CTA computes in one go: a tile row, a split of it along the keys, or a half tile
//   half tile      64 of the 128 queries of a tile row
//   CTA            a persistent CTA; the sm_90a kernels may pack several of these into one thread block
//   L2 head group  heads whose keys and values fit the L2 cache together
#ifndef STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_
#define STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_

#include <cstdint>
#include <vector>

#include "cuda/common/host_device.h"
#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// A kernel's cost model: nanoseconds of one CTA, and what its schedule may contain.
struct TileCost {
  int64_t row = 1;                // prologue and epilogue of a tile row
  int64_t full = 1, partial = 1;  // a KV tile without, and with, an element mask
  int64_t split_kv = 1;           // KV tiles of a tile row that a CTA computes at the same time
  int64_t ns_per_mib = 0;         // a MiB of keys and values, where they are read from memory more than once
  bool can_split_rows = false;    // CTAs can share a tile row along the keys; a combine kernel follows
  int64_t half_tile_pct = 0;      // cost of a half tile in percent of its tile row; 0: there are no half tiles
  bool dynamic = false;           // CTAs can fetch work tiles at run time from an atomic tile counter
  int ctas_per_sm = 1;
  int64_t solo_speed_pct = 100;  // speed of a CTA alone on its SM, in percent of one that shares it with all others
};

// Entries [begin, end) of the mask, those from `full` on without an element mask. In a schedule `full` is encoded:
// `end` for a whole tile row, else `end + 1` plus the subtile's index.
struct WorkTile {
  int32_t index;  // of the tile row: (b * H + h) * rows + row
  int32_t begin, full, end;
};
// The index of a split, counted from 0 over the schedule, or of a half tile (0 or 1); negative: a whole tile row.
STOF_HD inline int32_t SubtileOf(const WorkTile& tile) { return tile.full - tile.end - 1; }

// A tile row that is split along the keys.
struct SplitRow {
  int32_t index;         // of the tile row
  int32_t first, count;  // splits [first, first + count)
};

// The mask entry of KV tile i, for kernels without a schedule. A full tile comes first: nothing overlaps the first
// tile's softmax, and reading an element mask takes time.
STOF_HD inline int32_t EntryAt(const WorkTile& tile, int32_t i) {
  if (tile.begin == tile.full || tile.full >= tile.end) return tile.begin + i;
  return i == 0 ? tile.end - 1 : tile.begin + i - 1;
}

// The code of an entry of a tile list is -1 for a full tile. Else its low bits are the index of the element mask, and
// two bit sets name the groups of 64 query rows that skip the tile: they have no allowed pair in it, nor in any tile
// before it (leading) or behind it (trailing).
constexpr int kIdBits = 22, kMostRowGroups = 4;
constexpr int32_t kIdMask = (int32_t{1} << kIdBits) - 1;
STOF_HD inline int32_t LeadingSkips(int32_t code) { return code < 0 ? 0 : code >> kIdBits & 15; }
STOF_HD inline int32_t TrailingSkips(int32_t code) { return code < 0 ? 0 : code >> (kIdBits + kMostRowGroups) & 15; }

// The KV tiles of every tile row in the order in which a scheduled kernel computes them: those of the first row groups
// alone, a full one, partial ones of all groups, the other full ones, those of the last row groups alone. In a diagonal
// band the tiles of each row group are then contiguous.
struct TileList {
  std::vector<int32_t> key_tile, code;  // [nnz]
  std::vector<int32_t> skipped;         // [tables * rows]: pairs of a tile and a row group that skips it
};
TileList MakeTileList(const BlockMask& mask);

constexpr int kFirstTiles = 4;

// All that a CTA reads before its first copy, in one cache line: a short run takes as long as its chain of loads.
struct alignas(64) CtaStart {
  WorkTile first;                                // tile `begin` of the schedule, if there is one
  int32_t begin, end;                            // its work tiles
  int32_t tile[kFirstTiles], code[kFirstTiles];  // of the first KV tiles of `first`; tile -1 beyond its end
};

struct TileSchedule {
  std::vector<int32_t> begin;   // [ctas + 1]: CTA c has tiles [begin[c], begin[c + 1])
  std::vector<WorkTile> tiles;  // those of all CTAs, then the dynamic ones
  std::vector<SplitRow> split_rows;
  // Nanoseconds of the busiest CTA, and of the combine kernel. Dynamic tiles count as if they were static; exchanges
  // between CTAs of one SM are left out.
  int64_t makespan = 0;
  int64_t mean = 0;  // nanoseconds of a CTA in the mean, of whole tile rows
  int ctas() const { return static_cast<int>(begin.size()) - 1; }
  // Tiles that CTAs fetch at run time, in this order, after their own. Every CTA then has at least one of its own, and
  // there are no half tiles.
  int64_t dynamic_tiles() const { return begin.empty() ? 0 : static_cast<int64_t>(tiles.size()) - begin.back(); }
  int64_t splits() const { return split_rows.empty() ? 0 : split_rows.back().first + split_rows.back().count; }
};
// Limits of split rows; workspace sizes follow from them.
constexpr int64_t kMostScheduleSplits = 512, kFewestTilesOfSplit = 4;
constexpr int64_t kMostSplitsOfRow = 32;

// Whether a kernel without a schedule runs half tiles alone: where there is a CTA for each of them.
constexpr bool UsesHalfTiles(const TileCost& cost, int64_t rows, int ctas) {
  return cost.half_tile_pct > 0 && 2 * rows <= ctas;
}

// Workspace of a split of 64 query rows, for heads up to this size: outputs, row max and row sum.
constexpr int64_t SplitBytes(int64_t head_size) { return 64 * (4 * head_size + 8); }

// Whether a schedule can be made and is worth its time: beyond a million tile rows the load balances by chance, and a
// tile list can name only so many element masks.
bool CanSchedule(const BlockMask& mask, int64_t B, int64_t H);

// Longest processing time first (LPT, Graham 1969) within L2 head groups of up to l2_heads heads, then the smallest
// tile rows of all heads. CTAs carry their loads from group to group. A tile row that would end after the others moves
// to an earlier group. Where the result is uneven, half tiles or splits are tried if the kernel has them.
//
// refine: false for predictions, as kernel costs are fitted to such schedules; true for runs. It adds, where each pays:
//   co-scheduling  Few tile rows of each head attend all keys (global tokens), the others are a band: both run at the
//                  same time in the order of the keys, which are then read from memory once.
//   dynamic tiles  With 8 tile rows a CTA and more, CTAs fetch the last 1/8 of the work at run time: SMs differ in
//                  speed by some percent.
//   rebalance      Else CTAs exchange tile rows (cuda/schedule/rebalance.h), up to 8192 of them.
//   small rows     They stay in the L2 group of their head if the makespan hardly grows.
//
// ctas and l2_heads are at least 1, and B * H * rows fits an int32. group_size: query heads of a KV head (GQA).
TileSchedule MakeTileSchedule(const BlockMask& mask, const TileList& list, int64_t B, int64_t H, int ctas,
                              int64_t l2_heads, const TileCost& cost, bool refine = false, int64_t group_size = 1);

// Nanoseconds that a schedule takes, for the choice among kernels: the makespan. Where CTAs share an SM, the last one
// speeds up when the others are done, so that it is at least the mean and at most the makespan.
int64_t PredictScheduleTime(const TileSchedule& schedule, const TileCost& cost);

// A lower bound of PredictScheduleTime for this mask and cost, without making a schedule.
int64_t ScheduleLowerBound(const BlockMask& mask, int64_t B, int64_t H, int ctas, const TileCost& cost);

// One start for each CTA of the schedule. list: that of the schedule's mask.
std::vector<CtaStart> MakeCtaStarts(const TileSchedule& schedule, const TileList& list);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_TILE_SCHEDULE_H_
