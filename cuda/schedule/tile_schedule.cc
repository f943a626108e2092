// SPDX-License-Identifier: Apache-2.0
#include "cuda/schedule/tile_schedule.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <queue>
#include <utility>

#include "cuda/schedule/rebalance.h"

namespace stof {
namespace cuda {
namespace {

WorkTile MakeWorkTile(const BlockMask& mask, int64_t H, int64_t bh, int64_t row) {
  const auto at = static_cast<size_t>(mask.TableOf(bh / H, bh % H) * mask.rows + row);
  return {static_cast<int32_t>(bh * mask.rows + row), mask.row_ptr[at], mask.full_begin[at], mask.row_ptr[at + 1]};
}

// skipped: of row groups. A KV tile that one group skips takes the others less time, unless a CTA computes several KV
// tiles at once: then no group skips any.
int64_t TileRowCost(const WorkTile& tile, int64_t skipped, int groups, const TileCost& cost) {
  const int64_t all = (tile.end - tile.begin + cost.split_kv - 1) / cost.split_kv;
  const int64_t partial = (tile.full - tile.begin + cost.split_kv - 1) / cost.split_kv;
  const int64_t saved = cost.split_kv > 1 ? 0 : cost.partial * skipped / (2 * groups);
  return cost.row + cost.partial * partial + cost.full * (all - partial) - saved;
}

// Thresholds. A constant k...Share of n is the fraction 1 / n.
constexpr int64_t kMostScheduledRows = int64_t{1} << 20;
constexpr int64_t kSmallRowsShare = 32;   // of the work, for the smallest tile rows, which come last
constexpr int64_t kToleranceShare = 96;   // of the makespan, by which a longer schedule counts as equal
constexpr int64_t kHalvingShare = 256;    // of the makespan, which half tiles have to gain
constexpr int64_t kCoScheduleShare = 32;  // of the makespan: reading keys once instead of twice saves 4 to 10 %
constexpr int64_t kDynamicShare = 8;      // of the work, for the dynamic tiles
constexpr int64_t kDynamicRowShare = 12;  // of a CTA's work, which no dynamic tile may exceed
// Up to so many tile rows, all L2 group sizes are tried, and schedules are refined. Beyond, loads balance by chance.
constexpr size_t kMostRowsForGroupSizes = size_t{1} << 16, kMostRefinedRows = size_t{1} << 13;
// With fewer tile rows a CTA, the schedule is not refined: their order counts for more than their sum. The second
// number is for CTAs that share an SM.
constexpr size_t kFewestRowsOfCta = 8, kFewestRowsOfSharedCta = 3;
constexpr size_t kFewRowsOfCta = 4;     // with fewer, more alternatives are tried
constexpr int64_t kLongRow = 4;         // a long tile row costs so many times the mean, and as many times the others
constexpr int64_t kOverlappedPct = 45;  // of a prologue and epilogue, what the other CTAs of the SM overlap

// The combine kernel: its launch, and what each split is written and read for.
constexpr int64_t kCombine = 2000, kCombineSplit = 14;
int64_t CombineTime(const TileSchedule& schedule) {
  return schedule.split_rows.empty() ? 0 : kCombine + kCombineSplit * schedule.splits();
}

// The cost below which tile rows come last: together they take at most kSmallRowsShare of the work.
int64_t SmallRowLimit(const std::vector<CostedTile>& tiles, int64_t total) {
  std::vector<int64_t> costs;
  for (const CostedTile& tile : tiles) costs.push_back(tile.cost);
  std::sort(costs.begin(), costs.end());
  int64_t sum = 0;
  for (const int64_t cost : costs) {
    sum += cost;
    if (sum > total / kSmallRowsShare) return cost;
  }
  return 0;
}

int64_t TotalCost(const std::vector<CostedTile>& tiles) {
  return std::accumulate(tiles.begin(), tiles.end(), int64_t{0},
                         [](int64_t sum, const CostedTile& tile) { return sum + tile.cost; });
}

// Phases in which long tile rows run beside the band's tile rows of other heads. Phase p has the heads before
// phase_end[p] that no earlier phase has; those from phase_end.back() on have no phase.
struct CoSchedule {
  int64_t long_above = 0;  // a tile row of a greater cost is long
  std::vector<int64_t> phase_end;
  bool IsLong(const CostedTile& tile) const { return tile.cost > long_above; }
};

// How the LPT schedule is refined.
struct Refinement {
  bool dynamic = false, rebalance = false;
  bool small_rows_last = true;  // the smallest tile rows of all heads come last; else each in its head's group
  int ctas_per_sm = 1;
  int64_t overlapped_ns = 0;  // of each work tile, what the other CTAs of the SM overlap
  CoSchedule co_schedule;
};

// The first of the tiles, in LPT order, that are scheduled dynamically: they have kDynamicShare of the work. The first
// tile of each CTA stays static. A CTA fetches its next tile ahead of time, when others might begin a long one earlier:
// with long tiles there is no dynamic part.
size_t FirstDynamicTile(const std::vector<const CostedTile*>& in_order, int64_t total, int ctas) {
  size_t from = in_order.size();
  for (int64_t left = total / kDynamicShare; from > static_cast<size_t>(ctas); --from) {
    const int64_t cost = in_order[from - 1]->cost;
    left -= cost;
    if (left < 0) break;
    if (cost > total / ctas / kDynamicRowShare) return in_order.size();
  }
  return from;
}

// Whether the tile rows that are not long form a band: each reads, in the mean, at most two tile rows' worth of keys
// that the one before it does not. All heads have the same mask.
bool IsBand(const std::vector<CostedTile>& tiles, const CoSchedule& co_schedule, const BlockMask& mask) {
  std::vector<int32_t> before, own, added;
  int64_t new_tiles = 0, rows = 0;
  for (int64_t row = 0; row < mask.rows; ++row) {
    const CostedTile& tile = tiles[static_cast<size_t>(row)];
    if (co_schedule.IsLong(tile)) continue;
    own.assign(mask.key_tile.begin() + tile.tile.begin, mask.key_tile.begin() + tile.tile.end);
    std::sort(own.begin(), own.end());
    added.clear();
    std::set_difference(own.begin(), own.end(), before.begin(), before.end(), std::back_inserter(added));
    new_tiles += static_cast<int64_t>(added.size());
    ++rows;
    before.swap(own);
  }
  return new_tiles * mask.n <= 2 * mask.m * rows;
}

// Tile rows of global tokens read all keys of their head, from the first to the last. A phase runs them beside the
// band's tile rows of as many heads as take equally long, so that keys and values are read from memory once. Heads that
// get no phase have their long tile rows in the last one. There are no phases without such tile rows, where no band
// reads the same keys, or where L2 holds all heads.
CoSchedule MakeCoSchedule(const std::vector<CostedTile>& tiles, const BlockMask& mask, int64_t heads, int ctas,
                          int64_t l2_heads) {
  CoSchedule co_schedule;
  if (heads <= l2_heads || mask.layout.size() > 1 || mask.S != mask.T || tiles.empty()) return co_schedule;
  const int64_t total = TotalCost(tiles), share = total / ctas;
  co_schedule.long_above = kLongRow * (total / static_cast<int64_t>(tiles.size()));
  int64_t long_time = 0, long_rows = 0, longest_other = 0;
  for (const CostedTile& tile : tiles) {
    if (co_schedule.IsLong(tile)) {
      long_time += tile.cost, ++long_rows;
    } else {
      longest_other = std::max(longest_other, tile.cost);
    }
  }
  const int64_t length = long_rows > 0 ? long_time / long_rows : 0;
  // Other tile rows that are nearly as long need LPT.
  if (length == 0 || kLongRow * longest_other > length || !IsBand(tiles, co_schedule, mask)) return co_schedule;
  const int64_t others = std::max<int64_t>(1, (total - long_time) / heads);  // a head's
  for (int64_t end = 0, left = share / length; left > 0 && end < heads; --left) {
    const int64_t now = left > 1 ? ctas * length / (others + long_time / heads)
                                 : (ctas - (heads - end) * long_rows / heads) * length / others;
    end = std::clamp(end + now, end, heads);
    if (now <= 0) break;
    co_schedule.phase_end.push_back(end);
  }
  return co_schedule;
}

// LPT within L2 head groups of about l2_heads heads, and its refinement. tiles: in the order of their heads.
TileSchedule ScheduleGroups(const std::vector<CostedTile>& tiles, int64_t heads, int ctas, int64_t l2_heads,
                            const Refinement& refinement) {
  const int64_t total = TotalCost(tiles), share = total / ctas;
  const int64_t groups = (heads + l2_heads - 1) / l2_heads;
  const auto group_of = [&](int64_t head) { return (groups * (head + 1) - 1) / heads; };
  const int64_t small = refinement.small_rows_last ? SmallRowLimit(tiles, total) : 0;
  // When each group begins.
  std::vector<int64_t> begins(static_cast<size_t>(groups) + 1, 0);
  for (const CostedTile& tile : tiles) {
    if (tile.cost >= small) begins[static_cast<size_t>(group_of(tile.head)) + 1] += tile.cost;
  }
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  for (int64_t& begin : begins) begin /= ctas;
  // Tile rows of one group run together, since L2 holds its heads' keys and values. A long one comes in the last group
  // that leaves it the time: begun late it would end after all others. The smallest tile rows fill the end.
  const CoSchedule& co_schedule = refinement.co_schedule;
  const size_t phases = co_schedule.phase_end.size();
  std::vector<std::vector<const CostedTile*>> steps(phases + static_cast<size_t>(groups) + 1);
  for (const CostedTile& tile : tiles) {
    int64_t group = tile.cost < small ? groups : group_of(tile.head);
    size_t phase = phases;
    if (group < groups) {
      while (group > 0 && begins[static_cast<size_t>(group)] + tile.cost > share - share / kSmallRowsShare) --group;
      const auto own = std::upper_bound(co_schedule.phase_end.begin(), co_schedule.phase_end.end(), tile.head);
      phase = static_cast<size_t>(own - co_schedule.phase_end.begin());
      if (phase > 0 && own == co_schedule.phase_end.end() && co_schedule.IsLong(tile)) --phase;
    }
    steps[phase < phases ? phase : phase + static_cast<size_t>(group)].push_back(&tile);
  }
  using Load = std::pair<int64_t, int>;  // of a CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least_loaded;
  for (int cta = 0; cta < ctas; ++cta) least_loaded.emplace(0, cta);
  std::vector<std::vector<Assignment>> assigned(static_cast<size_t>(ctas));
  std::vector<const CostedTile*> in_order;
  TileSchedule schedule;
  for (size_t at = 0; at < steps.size(); ++at) {
    std::vector<const CostedTile*>& step = steps[at];
    // A phase has its long tile rows first, then the band in the order of the keys.
    std::stable_sort(step.begin(), step.end(), [&](const CostedTile* a, const CostedTile* b) {
      if (at >= phases) return a->cost > b->cost;
      const bool first = co_schedule.IsLong(*a), second = co_schedule.IsLong(*b);
      return first != second ? first : !first && a->tile.begin < b->tile.begin;
    });
    for (const CostedTile* tile : step) {
      const auto [load, cta] = least_loaded.top();
      least_loaded.pop();
      least_loaded.emplace(load + tile->cost, cta);
      schedule.makespan = std::max(schedule.makespan, load + tile->cost);
      assigned[static_cast<size_t>(cta)].push_back({tile, at, in_order.size()});
      in_order.push_back(tile);
    }
  }
  const size_t first_dynamic = refinement.dynamic ? FirstDynamicTile(in_order, total, ctas) : in_order.size();
  const bool rebalances = refinement.rebalance && first_dynamic == in_order.size();
  if (rebalances) schedule.makespan = Rebalance(1, 0, &assigned);
  const auto ctas_per_sm = static_cast<size_t>(refinement.ctas_per_sm);
  if (ctas_per_sm > 1 && assigned.size() % ctas_per_sm == 0) {
    BalanceSms(ctas_per_sm, &assigned);
    if (rebalances) Rebalance(ctas_per_sm, refinement.overlapped_ns, &assigned);
  }
  schedule.begin.push_back(0);
  for (const std::vector<Assignment>& own : assigned) {
    for (const Assignment& one : own) {
      if (one.order < first_dynamic) schedule.tiles.push_back(one.tile->tile);
    }
    schedule.begin.push_back(static_cast<int32_t>(schedule.tiles.size()));
  }
  for (size_t i = first_dynamic; i < in_order.size(); ++i) schedule.tiles.push_back(in_order[i]->tile);
  return schedule;
}

// The sizes of L2 head groups to try, largest first, each of which makes more groups than the one before. Many tile
// rows balance by chance; few may balance only in one group.
std::vector<int64_t> GroupSizesToTry(size_t tiles, int64_t heads, int ctas, int64_t l2_heads) {
  std::vector<int64_t> sizes;
  const auto add = [&](int64_t size) {
    size = std::clamp<int64_t>(size, 1, heads);
    const auto groups = [heads](int64_t of) { return (heads + of - 1) / of; };
    if (sizes.empty() || groups(size) > groups(sizes.back())) sizes.push_back(size);
  };
  if (tiles < kFewRowsOfCta * static_cast<size_t>(ctas)) add(heads);
  if (tiles <= kMostRowsForGroupSizes) {
    for (const int64_t divisor : {1, 2, 4}) add(l2_heads / divisor);
  }
  add(l2_heads / 8);
  return sizes;
}

// The schedule with the smallest L2 head groups that ends hardly later than others: few heads at a time leave the cache
// room, but balance worse. The smallest tile rows, put last, read all keys again; where rebalancing or dynamic tiles
// balance the loads, they stay with their heads if that ends hardly later.
//
// Sets refinement->small_rows_last and, unless nullptr, *group_heads to what the schedule has.
TileSchedule ScheduleBestGroups(const std::vector<CostedTile>& tiles, int64_t heads, int ctas, int64_t l2_heads,
                                Refinement* refinement, int64_t* group_heads = nullptr) {
  TileSchedule best;
  Refinement tried = *refinement;
  int64_t earliest = std::numeric_limits<int64_t>::max();
  const bool may_stay = (refinement->rebalance || refinement->dynamic) && refinement->co_schedule.phase_end.empty() &&
                        refinement->ctas_per_sm == 1;
  for (const int64_t size : GroupSizesToTry(tiles.size(), heads, ctas, l2_heads)) {
    for (const bool small_rows_last : {true, false}) {
      if (!small_rows_last && !may_stay) continue;
      tried.small_rows_last = small_rows_last;
      TileSchedule schedule = ScheduleGroups(tiles, heads, ctas, size, tried);
      // Where the last tile rows of all heads are too long to be dynamic, the smallest ones may be short enough.
      if (!small_rows_last && best.dynamic_tiles() > 0 && schedule.dynamic_tiles() == 0) continue;
      earliest = std::min(earliest, schedule.makespan);
      if (!best.begin.empty() && schedule.makespan - earliest > earliest / kToleranceShare) continue;
      best = std::move(schedule);
      refinement->small_rows_last = small_rows_last;
      if (group_heads != nullptr) *group_heads = size;
    }
  }
  return best;
}

// The two half tiles of a tile row, each with the KV tiles in which it has some pair.
void AddHalfTiles(const CostedTile& row, const TileList& list, const TileCost& cost, std::vector<CostedTile>* tiles) {
  for (int group = 0; group < 2; ++group) {
    CostedTile half = row;
    WorkTile& tile = half.tile;
    const auto code = [&list](int32_t at) { return list.code[static_cast<size_t>(at)]; };
    while (tile.begin < tile.end && (LeadingSkips(code(tile.begin)) >> group & 1) != 0) ++tile.begin;
    while (tile.begin < tile.end && (TrailingSkips(code(tile.end - 1)) >> group & 1) != 0) --tile.end;
    tile.full = tile.end + 1 + group;
    half.cost = cost.row;
    for (int32_t at = tile.begin; at < tile.end; ++at) half.cost += code(at) < 0 ? cost.full : cost.partial;
    half.cost = half.cost * cost.half_tile_pct / 100;
    tiles->push_back(half);
  }
}

// The tile rows, of which the first `count` of `order` are replaced by their half tiles.
std::vector<CostedTile> ReplaceWithHalfTiles(const std::vector<CostedTile>& rows, const std::vector<size_t>& order,
                                             size_t count, const TileList& list, const TileCost& cost) {
  std::vector<bool> halved(rows.size(), false);
  for (size_t i = 0; i < count; ++i) halved[order[i]] = true;
  std::vector<CostedTile> tiles;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (halved[i]) {
      AddHalfTiles(rows[i], list, cost, &tiles);
    } else {
      tiles.push_back(rows[i]);
    }
  }
  return tiles;
}

// The given schedule, or one with half tiles that ends earlier. Candidates are the last tile rows, whose heads are in
// L2 by then, the smallest, which lose least, and of few tile rows the largest. No rule tells how many of them are
// best: several numbers are tried.
TileSchedule TryHalfTiles(TileSchedule schedule, const std::vector<CostedTile>& rows, const TileList& list,
                          int64_t heads, int ctas, int64_t l2_heads, const TileCost& cost,
                          const Refinement& refinement) {
  const int64_t mean = TotalCost(rows) / ctas;
  if (rows.size() > kMostRefinedRows || schedule.makespan - mean <= mean / kToleranceShare) return schedule;
  std::vector<size_t> order(rows.size());
  const auto sort_by_cost = [&](bool descending) {
    std::stable_sort(order.begin(), order.end(), [&rows, descending](size_t a, size_t b) {
      return descending ? rows[a].cost > rows[b].cost : rows[a].cost < rows[b].cost;
    });
  };
  const auto try_count = [&](size_t count) {
    if (count == 0 || count > rows.size()) return;
    const std::vector<CostedTile> tiles = ReplaceWithHalfTiles(rows, order, count, list, cost);
    const auto used = static_cast<int>(std::min(tiles.size(), static_cast<size_t>(ctas)));
    TileSchedule other = ScheduleGroups(tiles, heads, used, l2_heads, refinement);
    if (other.makespan < schedule.makespan - schedule.makespan / kHalvingShare) schedule = std::move(other);
  };
  const size_t eighth = std::max<size_t>(1, static_cast<size_t>(ctas) / 8);
  const bool few = rows.size() < kFewRowsOfCta * static_cast<size_t>(ctas);
  const auto try_counts = [&] {
    for (const size_t eighths : {1, 2, 4, 8}) {
      if (few || eighths == 2 || eighths == 4) try_count(eighths * eighth);
    }
  };
  std::iota(order.rbegin(), order.rend(), size_t{0});
  try_counts();
  sort_by_cost(false);
  try_counts();
  if (!few) return schedule;
  sort_by_cost(true);
  try_counts();
  try_count(rows.size());
  return schedule;
}

// The tile rows, of which those longer than a CTA's mean load are split along the keys. A split takes 1 / of_share of
// that load. split_rows stays empty where no row is split or there are too many splits.
std::vector<CostedTile> SplitLongRows(const std::vector<CostedTile>& rows, const TileList& list, int ctas,
                                      const TileCost& cost, int64_t of_share, std::vector<SplitRow>* split_rows) {
  const int64_t share = TotalCost(rows) / ctas;
  const int64_t length = std::max(share / of_share, cost.row + kFewestTilesOfSplit * cost.full);
  std::vector<CostedTile> tiles;
  int64_t splits = 0;
  for (const CostedTile& row : rows) {
    const int64_t kv_tiles = row.tile.end - row.tile.begin;
    const int64_t count =
        std::min({(row.cost + length - 1) / length, kv_tiles / kFewestTilesOfSplit, kMostSplitsOfRow});
    if (row.cost <= share || count < 2) {
      tiles.push_back(row);
      continue;
    }
    split_rows->push_back({row.tile.index, static_cast<int32_t>(splits), static_cast<int32_t>(count)});
    for (int64_t i = 0; i < count; ++i) {
      CostedTile split = {cost.row, row.head, row.tile};
      split.tile.begin = static_cast<int32_t>(row.tile.begin + kv_tiles * i / count);
      split.tile.end = static_cast<int32_t>(row.tile.begin + kv_tiles * (i + 1) / count);
      split.tile.full = static_cast<int32_t>(split.tile.end + 1 + splits++);
      for (int32_t at = split.tile.begin; at < split.tile.end; ++at) {
        split.cost += list.code[static_cast<size_t>(at)] < 0 ? cost.full : cost.partial;
      }
      tiles.push_back(split);
    }
  }
  if (splits > kMostScheduleSplits) split_rows->clear();
  return tiles;
}

}  // namespace

bool CanSchedule(const BlockMask& mask, int64_t B, int64_t H) {
  const int64_t words = int64_t{mask.m} * mask.n / 32;
  return B * H * mask.rows <= kMostScheduledRows && static_cast<int64_t>(mask.bits.size()) / words <= kIdMask;
}

TileSchedule MakeTileSchedule(const BlockMask& mask, const TileList& list, int64_t B, int64_t H, int ctas,
                              int64_t l2_heads, const TileCost& cost, bool refine, int64_t group_size) {
  const int row_groups = std::max(1, mask.m / 64);
  std::vector<CostedTile> rows;
  for (int64_t bh = 0; bh < B * H; ++bh) {
    const int64_t table = mask.TableOf(bh / H, bh % H);
    for (int64_t row = 0; row < mask.rows; ++row) {
      WorkTile tile = MakeWorkTile(mask, H, bh, row);
      const int64_t own =
          TileRowCost(tile, list.skipped[static_cast<size_t>(table * mask.rows + row)], row_groups, cost);
      tile.full = tile.end;
      rows.push_back({own, bh, tile});
    }
  }
  const auto used_ctas = [ctas](const std::vector<CostedTile>& tiles) {
    return static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(tiles.size()), 1, ctas));
  };
  const size_t rows_of_cta = rows.size() / static_cast<size_t>(ctas);
  Refinement refinement;
  if (refine) {
    refinement.dynamic = cost.dynamic && rows_of_cta >= kFewestRowsOfCta;
    refinement.rebalance = rows_of_cta >= (cost.ctas_per_sm > 1 ? kFewestRowsOfSharedCta : kFewestRowsOfCta) &&
                           rows.size() <= kMostRefinedRows;
    refinement.ctas_per_sm = cost.ctas_per_sm;
    refinement.overlapped_ns = cost.row * kOverlappedPct / 100;
    if (group_size == 1) refinement.co_schedule = MakeCoSchedule(rows, mask, B * H, ctas, l2_heads);
  }
  int64_t group_heads = l2_heads;
  const int64_t mean = TotalCost(rows) / used_ctas(rows);
  TileSchedule schedule = ScheduleBestGroups(rows, B * H, used_ctas(rows), l2_heads, &refinement, &group_heads);
  if (!refinement.co_schedule.phase_end.empty()) {
    // Long tile rows of different lengths may balance badly in phases.
    Refinement without = refinement;
    without.co_schedule = CoSchedule();
    int64_t other_group_heads = l2_heads;
    TileSchedule other = ScheduleBestGroups(rows, B * H, used_ctas(rows), l2_heads, &without, &other_group_heads);
    if (schedule.makespan - other.makespan > other.makespan / kCoScheduleShare) {
      schedule = std::move(other);
      group_heads = other_group_heads;
      refinement = without;
    }
  }
  if (cost.half_tile_pct > 0 && schedule.dynamic_tiles() == 0) {
    refinement.dynamic = false;
    schedule = TryHalfTiles(std::move(schedule), rows, list, B * H, ctas, group_heads, cost, refinement);
  }
  schedule.mean = mean;
  if (!cost.can_split_rows) return schedule;
  // No rule tells which length of splits fills the CTAs best: three are tried. By the makespan, also where a CTA would
  // be faster alone: with tile rows left whole by PredictScheduleTime, 64 x 64 with 4 x 1 took up to 45 % longer.
  for (const int64_t of_share : {1, 2, 3}) {
    std::vector<SplitRow> split_rows;
    const std::vector<CostedTile> tiles = SplitLongRows(rows, list, ctas, cost, of_share, &split_rows);
    if (split_rows.empty()) continue;
    TileSchedule other = ScheduleBestGroups(tiles, B * H, used_ctas(tiles), l2_heads, &refinement);
    other.split_rows = std::move(split_rows);
    other.makespan += CombineTime(other);
    other.mean = mean;
    if (other.makespan < schedule.makespan) schedule = std::move(other);
  }
  return schedule;
}

int64_t PredictScheduleTime(const TileSchedule& schedule, const TileCost& cost) {
  if (cost.solo_speed_pct == 100) return schedule.makespan;
  const int64_t combine = CombineTime(schedule);
  return std::max(schedule.mean, (schedule.makespan - combine) * 100 / cost.solo_speed_pct) + combine;
}

int64_t ScheduleLowerBound(const BlockMask& mask, int64_t B, int64_t H, int ctas, const TileCost& cost) {
  const int groups = std::max(1, mask.m / 64);
  std::vector<int64_t> tables(mask.full_begin.size() / std::max<size_t>(1, static_cast<size_t>(mask.rows)), 0);
  for (int64_t bh = 0; bh < B * H; ++bh) ++tables[static_cast<size_t>(mask.TableOf(bh / H, bh % H))];
  int64_t total = 0, largest = 0;
  for (size_t at = 0; at < mask.full_begin.size(); ++at) {
    const WorkTile tile = {0, mask.row_ptr[at], mask.full_begin[at], mask.row_ptr[at + 1]};
    // As if all row groups but one skipped each partial tile.
    const int64_t own = TileRowCost(tile, int64_t{groups - 1} * (tile.full - tile.begin), groups, cost);
    total += own * tables[at / static_cast<size_t>(mask.rows)];
    // The half tile with more KV tiles has at least every second partial one.
    const int64_t half =
        cost.half_tile_pct *
        (cost.row + cost.partial * ((tile.full - tile.begin + 1) / 2) + cost.full * (tile.end - tile.full)) / 100;
    largest = std::max(largest, cost.half_tile_pct > 0 ? std::min(own, half) : own);
  }
  if (cost.can_split_rows) return total / ctas;
  if (cost.half_tile_pct == 0) return std::max(total / ctas, largest * 100 / cost.solo_speed_pct);
  // A KV tile of one row group alone costs 3 / 4 of a whole one, of which a half tile takes its percentage; that is
  // rounded down.
  const int64_t halved = total / ctas * std::min<int64_t>(300, 4 * cost.half_tile_pct) / 300;
  return std::max(halved - 2 * B * H * mask.rows / ctas - 2, largest * 100 / cost.solo_speed_pct);
}

}  // namespace cuda
}  // namespace stof
