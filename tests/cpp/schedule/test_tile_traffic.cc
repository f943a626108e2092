// SPDX-License-Identifier: Apache-2.0
// Memory traffic of tile schedules, by a model of the L2 cache. Needs no GPU.
#include <algorithm>
#include <list>
#include <map>
#include <tuple>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"

namespace stof::test {
namespace {

using cuda::LeadingSkips;
using cuda::MakeTileList;
using cuda::MakeTileSchedule;
using cuda::TileCost;
using cuda::TileList;
using cuda::TileSchedule;
using cuda::TrailingSkips;
using cuda::WorkTile;

constexpr const char* kGlobal = "abs(q - k) <= 128 or k < 64 or q < 64";
constexpr int kCtas = 132;
// 128 x 64 at D = 128, whose keys and values of a tile take 32 KiB.
constexpr TileCost kCost = {1278, 840, 948, 1, 0, false, 74, true, 1};
constexpr size_t kCached = (size_t{16} << 20) / (32 * 1024);  // tiles; L2 also holds other tensors

// L2 misses, in tiles of keys and values, of an LRU cache of `cached` tiles. CTAs run at the modelled costs, and the
// CTA that is done first fetches the next dynamic tile.
int64_t TilesFromMemory(const TileSchedule& schedule, const BlockMask& mask, const TileList& list, const TileCost& cost,
                        size_t cached) {
  std::vector<std::tuple<int64_t, int64_t, int32_t>> reads;  // time, head, tile
  std::vector<int64_t> now(static_cast<size_t>(schedule.ctas()), 0);
  const auto take = [&](int64_t* when, const WorkTile& tile) {
    *when += cost.row;
    for (int32_t at = tile.begin; at < tile.end; ++at) {
      const auto entry = static_cast<size_t>(at);
      reads.emplace_back(*when, tile.index / mask.rows, list.key_tile[entry]);
      const int32_t code = list.code[entry];
      const int skipped =
          (LeadingSkips(code) | TrailingSkips(code)) != 0 ? 1 : 0;  // one row group of two skips the tile
      *when += code < 0 ? cost.full : cost.partial * (4 - skipped) / 4;
    }
  };
  for (size_t w = 0; w < now.size(); ++w) {
    for (int32_t at = schedule.begin[w]; at < schedule.begin[w + 1]; ++at)
      take(&now[w], schedule.tiles[static_cast<size_t>(at)]);
  }
  for (auto at = static_cast<size_t>(schedule.begin.back()); at < schedule.tiles.size(); ++at) {
    take(&*std::min_element(now.begin(), now.end()), schedule.tiles[at]);
  }
  std::sort(reads.begin(), reads.end());
  std::list<std::pair<int64_t, int32_t>> recent;
  std::map<std::pair<int64_t, int32_t>, std::list<std::pair<int64_t, int32_t>>::iterator> known;
  int64_t missed = 0;
  for (const auto& [when, head, tile] : reads) {
    const std::pair<int64_t, int32_t> key = {head, tile};
    const auto found = known.find(key);
    if (found != known.end()) {
      recent.erase(found->second);
    } else {
      ++missed;
      if (recent.size() == cached) {
        known.erase(recent.back());
        recent.pop_back();
      }
    }
    recent.push_front(key);
    known[key] = recent.begin();
  }
  return missed;
}

void CheckRowsOnce(const TileSchedule& schedule, int64_t rows, const std::string& where) {
  std::vector<int> seen(static_cast<size_t>(rows), 0);
  for (const WorkTile& tile : schedule.tiles) {
    const int32_t subtile = cuda::SubtileOf(tile);
    seen[static_cast<size_t>(tile.index)] += subtile < 0 ? 3 : 1 << subtile;  // half tiles are 0 and 1
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 3; }), where);
}

struct Traffic {
  double before, after;  // misses a tile, without and with refinement
};
Traffic TrafficOf(const char* text, const ExprSizes& sizes, int64_t l2_heads, const TileCost& cost) {
  const BlockMask mask = BuiltMask(text, sizes, 128, 64);
  const TileList list = MakeTileList(mask);
  const auto all = static_cast<double>(sizes.B * sizes.H * (sizes.T / 64));
  double found[2];
  for (const bool refine : {false, true}) {
    const TileSchedule schedule = MakeTileSchedule(mask, list, sizes.B, sizes.H, kCtas, l2_heads, cost, refine);
    CheckRowsOnce(schedule, sizes.B * sizes.H * mask.rows, text);
    found[refine] = static_cast<double>(TilesFromMemory(schedule, mask, list, cost, kCached)) / all;
    CHECK(found[refine] >= 1.0, text, ": some tiles were never read");
  }
  return {found[0], found[1]};
}

// Tile rows of global tokens read all keys of their heads a second time, unless they are co-scheduled with the band:
// that of two thirds of 32 heads, as the rest is done before such a tile row ends, and of nearly all of more heads.
TEST(TileSchedulesReadKeysOfGlobalTokensOnce) {
  TileCost halves = kCost;  // a kernel with half tiles instead of dynamic ones
  halves.dynamic = false;
  int cases = 0;
  for (const TileCost& cost : {kCost, halves}) {
    for (const auto& [batches, heads, length, again] : {std::tuple(1, 32, 8192, 0.6), std::tuple(1, 32, 16384, 0.6),
                                                        std::tuple(1, 48, 8192, 0.3), std::tuple(4, 12, 8192, 0.3)}) {
      const ExprSizes sizes = {batches, heads, length, length, 0};
      const Traffic traffic = TrafficOf(kGlobal, sizes, 6 * 8192 / length, cost);
      const std::string where = Text(length, " keys of ", batches, " x ", heads, " heads: ");
      CHECK(traffic.before >= 1.8, where, traffic.before);
      CHECK(traffic.after - 1 <= again * (traffic.before - 1), where, traffic.after, " instead of ", traffic.before);
      ++cases;
    }
  }
  CountCases(cases);
}

bool HaveSameTiles(const TileSchedule& a, const TileSchedule& b) {
  return a.begin == b.begin &&
         std::equal(a.tiles.begin(), a.tiles.end(), b.tiles.begin(), b.tiles.end(),
                    [](const WorkTile& x, const WorkTile& y) { return x.index == y.index && x.begin == y.begin; });
}

// Nothing is co-scheduled where masks differ by head, heads share keys, there are more keys than queries, L2 holds all
// heads, the other tile rows are long themselves, or tile rows are split.
TEST(TileSchedulesCoScheduleOnlyWhereItPays) {
  TileCost cost = kCost;
  cost.dynamic = false;
  const auto is_unrefined = [&](const char* text, const ExprSizes& sizes, int64_t l2_heads, int64_t group_size) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 64);
    const TileList list = MakeTileList(mask);
    const TileSchedule schedule =
        MakeTileSchedule(mask, list, sizes.B, sizes.H, kCtas, l2_heads, cost, true, group_size);
    return HaveSameTiles(schedule, MakeTileSchedule(mask, list, sizes.B, sizes.H, kCtas, l2_heads, cost));
  };
  const ExprSizes sizes = {6, 32, 8192, 8192, 0};  // too many tile rows to rebalance
  CHECK(!is_unrefined(kGlobal, sizes, 6, 1));
  CHECK(is_unrefined(kGlobal, sizes, 6, 4));
  CHECK(is_unrefined(kGlobal, sizes, 6 * 32, 1));
  CHECK(is_unrefined("abs(q - k) <= 128 or k < 64 or q < 64 + 64 * (h % 2)", sizes, 6, 1));
  CHECK(is_unrefined(kGlobal, {9, 32, 4096, 8192, 0}, 6, 1));
  CHECK(is_unrefined("abs(q - k) <= 128 or k < 64 or q < 64 or (q % 2048 < 128 and k < 2560)", sizes, 6, 1));
  const BlockMask mask = BuiltMask(kGlobal, {1, 16, 4096, 4096, 0}, 64, 64);
  const TileList list = MakeTileList(mask);
  const TileCost split = {3320, 1231, 1525, 1, 0, true};
  const TileSchedule schedule = MakeTileSchedule(mask, list, 1, 16, 528, 4, split, true);
  CHECK(schedule.splits() > 0 && HaveSameTiles(schedule, MakeTileSchedule(mask, list, 1, 16, 528, 4, split)));
  CountCases(7);
}

// Co-scheduling long tile rows of different lengths unbalances CTAs: the makespan hardly grows.
TEST(TileSchedulesCoScheduledEndAsEarly) {
  int cases = 0;
  for (const auto& [text, heads, length] :
       {std::tuple("(k <= q and q - k <= 4) or q >= S - 128 or (q % 1152 < 128 and k < 5820)", 16, 18432),
        std::tuple("(k <= q and q - k <= 25) or q < 128 or (q % 2048 < 128 and k < 3483)", 30, 20480),
        std::tuple("abs(q - k) <= 53 or q >= S - 128 or (q % 1408 < 128 and k < 4691)", 16, 18432),
        std::tuple("abs(q - k) <= 64 or q < 128 or (q % 2048 < 128 and k < 3483)", 32, 16384),
        std::tuple(kGlobal, 32, 8192), std::tuple(kGlobal, 48, 8192)}) {
    const ExprSizes sizes = {1, heads, length, length, 0};
    for (const int n : {64, 128}) {
      const BlockMask mask = BuiltMask(text, sizes, 128, n);
      const TileList list = MakeTileList(mask);
      const TileCost cost = n == 64 ? kCost : TileCost{2553, 1381, 1506, 1, 0, false, 74};
      const int64_t before = MakeTileSchedule(mask, list, 1, heads, kCtas, 2, cost).makespan;
      const int64_t after = MakeTileSchedule(mask, list, 1, heads, kCtas, 2, cost, true).makespan;
      CHECK(after - before <= before / 32, text, " by ", n, ": ", after, " instead of ", before);
      ++cases;
    }
  }
  CountCases(cases);
}

// 32 heads in L2 groups of up to 6: a last group of two heads would have too few tile rows to balance the loads.
TEST(TileSchedulesBalanceCausalRows) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  int cases = 0;
  for (const int m : {128, 192}) {
    const BlockMask mask = BuiltMask("k <= q", sizes, m, 64);
    const TileList list = MakeTileList(mask);
    const TileCost cost = {4554, 952, 1040};
    for (int64_t l2_heads = 1; l2_heads <= 32; ++l2_heads) {
      const TileSchedule schedule = MakeTileSchedule(mask, list, sizes.B, sizes.H, 132, l2_heads, cost);
      const int64_t total = MakeTileSchedule(mask, list, sizes.B, sizes.H, 1, l2_heads, cost).makespan;
      CHECK(schedule.makespan * 100 <= total / 132 * 102, m, " rows, L2 group of ", l2_heads, ": ", schedule.makespan,
            " of ", total / 132);
      ++cases;
    }
  }
  CountCases(cases);
}

// One CTA computes the L2 groups one after the other, then the smallest tile rows of all heads.
TEST(TileSchedulesKeepL2GroupsTogether) {
  const ExprSizes sizes = {1, 32, 4096, 4096, 0};
  const BlockMask mask = BuiltMask("k <= q", sizes, 128, 128);
  const TileSchedule schedule = MakeTileSchedule(mask, MakeTileList(mask), sizes.B, sizes.H, 1, 6, {2700, 1380, 1480});
  const auto rows = static_cast<int32_t>(mask.rows);
  size_t at = 0;
  int32_t highest = 0;
  for (int32_t l2_heads = 0; l2_heads < 6; ++l2_heads) {
    const int32_t first = 32 * l2_heads / 6, last = 32 * (l2_heads + 1) / 6;
    for (; at < schedule.tiles.size() && schedule.tiles[at].index / rows < last; ++at) {
      if (schedule.tiles[at].index / rows < first) break;  // the smallest tile rows have begun
      highest = std::max(highest, schedule.tiles[at].index / rows);
    }
    CHECK(highest == last - 1, "an L2 group of ", l2_heads, " ends with head ", highest);
  }
  int64_t last_tiles = 0, total = 0;
  for (size_t i = 0; i < schedule.tiles.size(); ++i) {
    const int64_t tiles = schedule.tiles[i].end - schedule.tiles[i].begin;
    total += tiles;
    if (i < at) continue;
    last_tiles += tiles;
    CHECK(tiles <= 8, "a tile row of ", tiles, " tiles comes last");
  }
  CHECK(last_tiles > 0 && last_tiles * 32 <= total, last_tiles, " of ", total, " tiles come last");
  CountCases(1);
}

// Where the schedule is rebalanced or has dynamic tiles, the smallest tile rows of all heads do not come last: there
// they would read all keys from memory again.
TEST(TileSchedulesKeepSmallRowsWithTheirHeads) {
  const std::string random =
      "((q // 128) * 7919 + (k // 128) * 104729 + (q // 128) * (k // 128) * 31 + "
      "(q // 128) * (q // 128) * 17) % 1009 % 100 < 12";
  TileCost halves = kCost;
  halves.dynamic = false;
  int cases = 0;
  for (const TileCost& cost : {kCost, halves}) {
    for (const auto& [text, length] : {std::pair(random, 8192), std::pair(random, 16384)}) {
      const ExprSizes sizes = {1, 32, length, length, 0};
      const Traffic traffic = TrafficOf(text.c_str(), sizes, 6 * 8192 / length, cost);
      CHECK(traffic.after - 1 <= 0.7 * (traffic.before - 1), text, " of ", length, " keys: ", traffic.after,
            " instead of ", traffic.before);
      ++cases;
    }
  }
  CountCases(cases);
}

// Without long tile rows, or without a band beside them, refinement reads head by head as LPT does.
TEST(TileSchedulesKeepHeadsTogetherElsewhere) {
  int cases = 0;
  for (const auto& [text, heads] : {std::pair("k <= q", 32), std::pair("k <= q", 8),
                                    std::pair("abs(q - k) <= 128 or k < 64", 32), std::pair("abs(q - k) <= 128", 32),
                                    std::pair("abs(q - k) <= 128 or q < 64 or (q // 64 * 7 + k // 64 * 13 + "
                                              "(q // 64) * (k // 64)) % 23 == 0",
                                              32)}) {
    const int64_t length = Effort() < 1 ? 4096 : 8192;  // by sanitizers a long one takes its time
    const ExprSizes sizes = {1, heads, length, length, 0};
    const Traffic traffic = TrafficOf(text, sizes, 6 * 8192 / length, kCost);
    CHECK(traffic.after <= 1.1 * traffic.before, text, " of ", heads, " heads: ", traffic.after, " instead of ",
          traffic.before);
    ++cases;
  }
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
