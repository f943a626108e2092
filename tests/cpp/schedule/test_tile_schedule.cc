// SPDX-License-Identifier: Apache-2.0
// Tile schedules: every tile row once, no CTA with much more than its share. Needs no GPU.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/mask/random_expr.h"
#include "tests/cpp/schedule/schedule_checks.h"

namespace stof::test {
namespace {

using cuda::LeadingSkips;
using cuda::MakeTileList;
using cuda::MakeTileSchedule;
using cuda::TileCost;
using cuda::TileList;
using cuda::TileSchedule;
using cuda::WorkTile;

TEST(TileSchedulesTakeEveryRowOnce) {
  const char* const masks[] = {"k <= q", "abs(q - k) <= 40", "abs(q - k) <= 32 or k < 16 or q < 16",
                               "k <= q and (q // 64 - k // 64 < 2 or (k // 64 + h) % 3 == 0)", "k == q + 1000"};
  Random random(7);
  int cases = 0;
  for (const char* text : masks) {
    for (int i = 0; i < 12; ++i) {
      const ExprSizes sizes = {random.Range(1, 3), random.Range(1, 9), random.Range(1, 700), random.Range(1, 700), 0};
      const int m = 64 * static_cast<int>(random.Range(1, 4)), n = 32 * static_cast<int>(random.Range(1, 5));
      const BlockMask mask = BuiltMask(text, sizes, m, n);
      const int ctas = static_cast<int>(random.Range(1, 40));
      const int64_t l2_heads = random.Range(1, 2 * sizes.H);
      TileCost cost = {random.Range(1, 4000), random.Range(1, 2000), random.Range(1, 2000)};
      cost.split_kv = int64_t{1} << random.Range(0, 2);
      cost.can_split_rows = m == 64 && cost.split_kv == 1;
      if (m == 128 && cost.split_kv == 1) cost.half_tile_pct = random.Range(50, 90);
      const TileList list = MakeTileList(mask);
      CheckTileList(mask, list, text);
      const std::string name = Text(text, " S ", sizes.S, " T ", sizes.T, " CTAs ");
      CheckSchedule(mask, list, sizes, ctas, l2_heads, cost, name);
      // Ten tile rows for each CTA, enough to rebalance.
      const auto few = static_cast<int>(std::max<int64_t>(1, sizes.B * sizes.H * mask.rows / 10));
      CheckSchedule(mask, list, sizes, few, l2_heads, cost, "refined, " + name, true);
      cost.ctas_per_sm = static_cast<int>(random.Range(2, 4));
      cost.solo_speed_pct = random.Range(101, 100 * cost.ctas_per_sm);
      CheckSchedule(mask, list, sizes, few, l2_heads, cost, Text(cost.ctas_per_sm, " CTAs an SM, ", name), true);
      CheckSchedule(mask, list, sizes, ctas, l2_heads, cost,
                    Text(cost.ctas_per_sm, " CTAs an SM, not refined, ", name));
      cases += 4;
    }
  }
  CountCases(cases);
}

// A tile row of global tokens as long as a CTA's share: begun last it would double the time.
TEST(TileSchedulesBeginWithLargeRows) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 128, 128);
  const TileCost cost = {2200, 1655, 1900};
  const TileSchedule schedule = MakeTileSchedule(mask, MakeTileList(mask), sizes.B, sizes.H, 132, 5, cost);
  const int64_t total =
      std::accumulate(schedule.tiles.begin(), schedule.tiles.end(), int64_t{0},
                      [&](int64_t sum, const WorkTile& tile) { return sum + CostOf(tile, 0, 1, cost); });
  CHECK(schedule.makespan * 100 <= total / 132 * 110, schedule.makespan, " of ", total / 132);
  CountCases(1);
}

// How many heads the CTAs work on at the same time, in the mean over the schedule: L2 has to hold their keys and
// values.
double HeadsUnderWay(const TileSchedule& schedule, const BlockMask& mask, const TileList& list, int64_t heads,
                     const TileCost& cost) {
  std::vector<std::pair<int64_t, std::pair<int, int64_t>>> events;  // time; +1 or -1 work tile; of which head
  for (size_t w = 0; w + 1 < schedule.begin.size(); ++w) {
    int64_t now = 0;
    for (int32_t at = schedule.begin[w]; at < schedule.begin[w + 1]; ++at) {
      const WorkTile& tile = schedule.tiles[static_cast<size_t>(at)];
      const int64_t bh = tile.index / mask.rows;
      const auto row = static_cast<size_t>(mask.TableOf(0, bh) * mask.rows + tile.index % mask.rows);
      events.push_back({now, {1, bh}});
      now += CostOf({0, tile.begin, mask.full_begin[row], tile.end}, list.skipped[row], mask.m / 64, cost);
      events.push_back({now, {-1, bh}});
    }
  }
  std::sort(events.begin(), events.end());
  std::vector<int> under_way(static_cast<size_t>(heads), 0);
  double sum = 0;
  int64_t last = 0;
  for (const auto& [when, change] : events) {
    const auto some = std::count_if(under_way.begin(), under_way.end(), [](int n) { return n > 0; });
    sum += static_cast<double>(when - last) * static_cast<double>(some);
    last = when;
    under_way[static_cast<size_t>(change.second)] += change.first;
  }
  return sum / static_cast<double>(schedule.makespan);
}

// All heads at once have 134 MB of keys and values, and L2 holds 50 MB.
TEST(TileSchedulesWorkOnFewHeadsAtOnce) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  const TileCost cost = {2553, 1381, 1506};
  int cases = 0;
  for (const auto& [text, most] :
       {std::pair("k <= q", 10), std::pair("abs(q - k) <= 128", 5), std::pair("k <= q and q - k < 1024", 6),
        std::pair("(31 * (q // 128) * (q // 128) + 57 * (k // 128) + 73 * (q // 128) * (k // 128)) % 101 < 12", 7)}) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 128);
    const TileList list = MakeTileList(mask);
    for (const int64_t l2_heads : {3, 6, 12}) {
      const TileSchedule schedule = CheckSchedule(mask, list, sizes, 132, l2_heads, cost, Text(text, " CTAs "));
      const double heads = HeadsUnderWay(schedule, mask, list, sizes.H, cost);
      CHECK(heads <= most, text, " L2 group of ", l2_heads, ": ", heads, " heads under way");
      ++cases;
    }
  }
  CountCases(cases);
}

// The makespan of LPT over the tile rows of all heads.
int64_t LongestFirst(const BlockMask& mask, const TileList& list, const ExprSizes& sizes, int ctas,
                     const TileCost& cost) {
  std::vector<int64_t> costs, loads(static_cast<size_t>(ctas), 0);
  for (int64_t bh = 0; bh < sizes.B * sizes.H; ++bh) {
    for (int64_t i = 0; i < mask.rows; ++i) {
      const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + i);
      const WorkTile tile = {0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]};
      costs.push_back(CostOf(tile, list.skipped[row], mask.m / 64, cost));
    }
  }
  std::sort(costs.rbegin(), costs.rend());
  for (const int64_t own : costs) *std::min_element(loads.begin(), loads.end()) += own;
  return *std::max_element(loads.begin(), loads.end());
}

// L2 head groups must not unbalance few tile rows.
TEST(TileSchedulesOfFewRowsEndEarly) {
  Random random(11);
  int cases = 0;
  for (const char* text : {"k <= q", "abs(q - k) <= 40", "abs(q - k) <= 32 or k < 16 or q < 16"}) {
    for (int i = 0; i < 40; ++i) {
      const int64_t length = 128 * random.Range(1, 8);
      const ExprSizes sizes = {random.Range(1, 4), random.Range(1, 48), length, length, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 128);
      const TileList list = MakeTileList(mask);
      const int ctas = random.Range(0, 1) == 0 ? 132 : 22;
      if (sizes.B * sizes.H * mask.rows >= 4 * ctas) continue;
      const int64_t l2_heads = random.Range(1, 40);
      const TileCost cost = {2553, 1381, 1506};
      const int64_t best = LongestFirst(mask, list, sizes, ctas, cost);
      const TileSchedule schedule = CheckSchedule(mask, list, sizes, ctas, l2_heads, cost, Text(text, " CTAs "));
      CHECK(schedule.makespan * 100 <= best * 102, text, " B ", sizes.B, " H ", sizes.H, " S ", length, " L2 group of ",
            l2_heads, " CTAs ", ctas, ": ", schedule.makespan, ", longest first ", best);
      ++cases;
    }
  }
  CHECK(cases >= 40, cases);
  CountCases(cases);
}

// Tile rows of which some CTAs have one more than others, or which are fewer than the CTAs.
TEST(TileSchedulesUseHalfTiles) {
  int cases = 0;
  for (const auto& [text, heads, length, percent] :
       {std::tuple("abs(q - k) <= 128", 32, 8192, 98),
        std::tuple("abs(q - k) <= 128 or k < 64 or q < 64", 32, 8192, 99), std::tuple("abs(q - k) <= 45", 12, 2048, 85),
        std::tuple("k <= q", 12, 1024, 85), std::tuple("k <= q", 12, 128, 70)}) {
    const ExprSizes sizes = {1, heads, length, length, 0};
    const BlockMask mask = BuiltMask(text, sizes, 128, 128);
    const TileList list = MakeTileList(mask);
    TileCost cost = {2553, 1381, 1506};
    const int64_t whole = MakeTileSchedule(mask, list, 1, heads, 132, 3, cost).makespan;
    cost.half_tile_pct = 65;
    const TileSchedule schedule = CheckSchedule(mask, list, sizes, 132, 3, cost, Text(text, " CTAs "));
    const auto halves = std::count_if(schedule.tiles.begin(), schedule.tiles.end(),
                                      [](const WorkTile& tile) { return cuda::SubtileOf(tile) >= 0; });
    CHECK(halves > 0 && halves % 2 == 0 && schedule.makespan * 100 <= whole * percent, text, " S ", length, ": ",
          halves, " half tiles, ", schedule.makespan, " of ", whole);
    ++cases;
  }
  CountCases(cases);
}

int32_t HeadOf(const WorkTile& tile, const BlockMask& mask) { return tile.index / mask.rows; }

// How often a CTA goes back to an earlier head.
size_t TimesBack(const TileSchedule& schedule, const BlockMask& mask) {
  size_t times = 0;
  for (size_t w = 0; w + 1 < schedule.begin.size(); ++w) {
    for (auto at = static_cast<size_t>(schedule.begin[w]) + 1; at < static_cast<size_t>(schedule.begin[w + 1]); ++at) {
      times += HeadOf(schedule.tiles[at], mask) < HeadOf(schedule.tiles[at - 1], mask) ? 1 : 0;
    }
  }
  return times;
}

// Tile rows of 0 to 21 tiles, as random block masks have them: LPT alone ends 1 to 4 % after the mean.
TEST(TileSchedulesAreRebalanced) {
  int cases = 0;
  for (const char* most : {"12", "22"}) {
    const std::string rows = "(q // 128)", keys = "(k // 128)";
    const std::string text = "(" + rows + " * 7919 + " + keys + " * 104729 + " + rows + " * " + keys + " * 31 + " +
                             rows + " * " + rows + " * 17) % 1009 % 100 < " + most;
    for (const int64_t heads : {16, 32}) {
      const ExprSizes sizes = {1, heads, 8192, 8192, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 128);
      const TileList list = MakeTileList(mask);
      TileCost cost = {2553, 1381, 1506};
      const int64_t mean = MakeTileSchedule(mask, list, 1, heads, 1, 4, cost).makespan / 132;
      cost.half_tile_pct = 74;
      const TileSchedule unrefined = CheckSchedule(mask, list, sizes, 132, 4, cost, Text(text, " CTAs "));
      const TileSchedule even = CheckSchedule(mask, list, sizes, 132, 4, cost, Text(text, " refined, CTAs "), true);
      const std::string where =
          Text(text, " H ", heads, ": ", even.makespan, ", unrefined ", unrefined.makespan, ", mean ", mean);
      // 7.75 tile rows a CTA stay as they are, 15.5 are rebalanced.
      CHECK(heads == 16 ? even.makespan == unrefined.makespan : even.makespan < unrefined.makespan, where);
      CHECK(100 * (unrefined.makespan - mean) >= mean, where);
      CHECK(heads == 16 || 1000 * (even.makespan - mean) <= 7 * mean, where);
      // Without refinement the smallest tile rows of all heads come last; rebalanced ones stay with their head.
      cost.half_tile_pct = 0;
      const size_t before = TimesBack(MakeTileSchedule(mask, list, 1, heads, 132, 1, cost), mask);
      const size_t after = TimesBack(MakeTileSchedule(mask, list, 1, heads, 132, 1, cost, true), mask);
      CHECK(heads == 16 ? after == before : 2 * after <= before, where, ", back to an earlier head ", after,
            " times instead of ", before);
      ++cases;
    }
  }
  CountCases(cases);
}

// Dynamic tiles are an eighth of the work. Given in their order to the least loaded CTA they end at the makespan, which
// is hardly later than without refinement.
void CheckDynamic(const TileSchedule& schedule, const TileSchedule& unrefined, const BlockMask& mask,
                  const TileList& list, const TileCost& cost, const std::string& where) {
  const auto ctas = static_cast<size_t>(schedule.ctas());
  int64_t total = 0, dynamic = 0, largest = 0;
  std::vector<int64_t> loads(ctas, 0);
  for (size_t w = 0; w < ctas; ++w) {
    for (const int32_t item : TilesOf(schedule, w)) loads[w] += CostOfRow(item, mask, list, cost);
    total += loads[w];
  }
  for (const int32_t item : TilesOf(schedule, ctas)) {
    const int64_t one = CostOfRow(item, mask, list, cost);
    const auto least = static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[least] += one;
    total += one, dynamic += one, largest = std::max(largest, one);
  }
  CHECK(8 * dynamic <= total && 10 * dynamic >= total, where, ": ", dynamic, " of ", total);
  CHECK(12 * largest <= total / schedule.ctas(), where, ": one of ", largest);
  const int64_t longest = *std::max_element(loads.begin(), loads.end());
  CHECK(schedule.makespan == longest, where, ": says ", schedule.makespan, ", is ", longest);
  CHECK(schedule.makespan - unrefined.makespan <= unrefined.makespan / 32, where, ": ", schedule.makespan,
        ", unrefined ", unrefined.makespan);
}

TEST(TileSchedulesHaveDynamicTiles) {
  CHECK(TileSchedule().dynamic_tiles() == 0);  // a mask without a schedule
  int cases = 0;
  for (const char* text : {"abs(q - k) <= 128", "abs(q - k) <= 128 or k < 64 or q < 64", "k <= q and q - k < 700"}) {
    for (const int64_t heads : {17, 32, 64}) {
      for (const int64_t l2_heads : {1, 5, 64}) {
        const ExprSizes sizes = {1, heads, 8192, 8192, 0};
        const BlockMask mask = BuiltMask(text, sizes, 128, 64);
        const TileList list = MakeTileList(mask);
        TileCost cost = {1278, 840, 948};
        cost.dynamic = true;
        const std::string where = Text(text, " H ", heads, " L2 group of ", l2_heads);
        const TileSchedule unrefined =
            CheckSchedule(mask, list, sizes, 132, l2_heads, cost, where + ", unrefined, CTAs ");
        const TileSchedule schedule = CheckSchedule(mask, list, sizes, 132, l2_heads, cost, where + ", CTAs ", true);
        CHECK(unrefined.dynamic_tiles() == 0, where);
        // A tile row of 17 heads is an eighth of a CTA's share: too long to be dynamic.
        CHECK((schedule.dynamic_tiles() == 0) == (heads == 17), where, ": ", schedule.dynamic_tiles(), " dynamic");
        if (schedule.dynamic_tiles() > 0) CheckDynamic(schedule, unrefined, mask, list, cost, where);
        ++cases;
      }
    }
  }
  // The smallest tile rows are short enough to be dynamic where the last ones of all heads are not.
  for (const auto& [heads, length] : {std::pair(24, 16384), std::pair(48, 8192)}) {
    const ExprSizes sizes = {1, heads, length, length, 0};
    const BlockMask mask = BuiltMask("k <= q", sizes, 128, 64);
    TileCost cost = {1278, 840, 948};
    cost.dynamic = true;
    const TileSchedule schedule =
        MakeTileSchedule(mask, MakeTileList(mask), 1, heads, 132, 6 * 8192 / length, cost, true);
    CHECK(schedule.dynamic_tiles() > 500, heads, " heads: ", schedule.dynamic_tiles());
    ++cases;
  }
  // A schedule has half tiles or dynamic tiles, not both; and no long dynamic tiles, for a CTA fetches ahead of time.
  int64_t dynamic = 0, halved = 0;
  for (const char* text : {"abs(q - k) <= 128", "k <= q and q - k < 700", "q % 1000 == k % 1000", "k <= q"}) {
    for (const int64_t heads : {18, 20, 22, 23, 25, 32}) {
      const ExprSizes sizes = {1, heads, 8192, 8192, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 64);
      TileCost cost = {1278, 840, 948};
      cost.dynamic = true, cost.half_tile_pct = 74;
      const std::string where = Text(text, " H ", heads);
      const TileSchedule schedule =
          CheckSchedule(mask, MakeTileList(mask), sizes, 132, 4, cost, where + ", half tiles, CTAs ", true);
      const bool half = std::any_of(schedule.tiles.begin(), schedule.tiles.end(),
                                    [](const WorkTile& tile) { return cuda::SubtileOf(tile) >= 0; });
      CHECK(!half || schedule.dynamic_tiles() == 0, where, ": ", schedule.dynamic_tiles(),
            " dynamic beside half tiles");
      CHECK(text != std::string("k <= q") || schedule.dynamic_tiles() == 0, where, ": ", schedule.dynamic_tiles(),
            " long ones dynamic");
      halved += half ? 1 : 0, dynamic += schedule.dynamic_tiles() > 0 ? 1 : 0;
      ++cases;
    }
  }
  CHECK(halved > 2 && dynamic > 2, halved, " schedules with half tiles, ", dynamic, " with dynamic tiles");
  CountCases(cases);
}

// So many tile rows that one schedule is made, with the smallest L2 groups, and is not refined.
TEST(TileSchedulesOfManyRows) {
  const ExprSizes sizes = {9, 32, 16384, 16384, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 64", sizes, 64, 64);
  const TileList list = MakeTileList(mask);
  for (const int64_t l2_heads : {1, 2, 3, 4, 5, 8, 40}) {
    const TileSchedule schedule =
        CheckSchedule(mask, list, sizes, 132, l2_heads, {2553, 1381, 1506}, "many rows, CTAs ", true);
    CHECK(schedule.tiles.size() == 73728, "L2 heads ", l2_heads, ": ", schedule.tiles.size());
    const TileSchedule unrefined = MakeTileSchedule(mask, list, sizes.B, sizes.H, 132, l2_heads, {2553, 1381, 1506});
    CHECK(schedule.begin == unrefined.begin &&
              std::equal(schedule.tiles.begin(), schedule.tiles.end(), unrefined.tiles.begin(),
                         [](const WorkTile& a, const WorkTile& b) { return a.index == b.index; }),
          "L2 heads ", l2_heads, ": tiles moved");
  }
  CountCases(7);
}

// Tile rows of global tokens are a tenth of the work, each longer than the mean: they are split.
TEST(TileSchedulesSplitLongRows) {
  TileCost cost = {3320, 1231, 1525};
  const ExprSizes sizes = {1, 16, 4096, 4096, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 64, 64);
  const TileList list = MakeTileList(mask);
  const int64_t whole = MakeTileSchedule(mask, list, sizes.B, sizes.H, 528, 16, cost).makespan;
  cost.can_split_rows = true;
  const TileSchedule schedule = CheckSchedule(mask, list, sizes, 528, 16, cost, "longformer, CTAs ");
  CHECK(schedule.split_rows.size() == 16 && 2 * schedule.makespan < whole, schedule.split_rows.size(), " rows, ",
        schedule.makespan, " of ", whole);
  cost.ctas_per_sm = 4, cost.solo_speed_pct = 250;
  CheckSchedule(mask, list, sizes, 528, 16, cost, "longformer, four CTAs an SM, CTAs ");
  cost.ctas_per_sm = 1, cost.solo_speed_pct = 100;
  // Equal tile rows, if there are enough of them, are not split.
  const BlockMask band = BuiltMask("abs(q - k) <= 128", sizes, 64, 64);
  CHECK(CheckSchedule(band, MakeTileList(band), sizes, 528, 16, cost, "window, CTAs ").split_rows.empty());
  // With more splits than the limit, tile rows stay whole.
  const ExprSizes many = {8, 16, 4096, 4096, 0};
  CHECK(CheckSchedule(mask, list, many, 40000, 16, cost, "many, CTAs ").split_rows.empty());
  CountCases(4);
}

// A tile row of all keys beside short ones: the CTA that is left with it, or with a half tile of it, has its SM to
// itself and is faster by solo_speed_pct.
TEST(TileSchedulesSpeedUpACtaAlone) {
  const ExprSizes sizes = {1, 2, 1024, 1024, 0};
  const BlockMask mask = BuiltMask("q < 128 or k == q", sizes, 128, 64);
  const TileList list = MakeTileList(mask);
  TileCost cost = {1000, 500, 500};
  cost.ctas_per_sm = 2;
  // One of 16 tiles and seven of two, each of which one row group skips: 250 less.
  const int64_t mean = (9000 + 7 * 1750) / 8;
  for (const auto& [alone, half, time] :
       {std::tuple(100, 0, int64_t{9000}), std::tuple(150, 0, int64_t{6000}), std::tuple(150, 80, int64_t{4800}),
        std::tuple(200, 0, int64_t{4500}), std::tuple(400, 0, mean), std::tuple(400, 80, mean)}) {
    cost.solo_speed_pct = alone, cost.half_tile_pct = half;
    const TileSchedule schedule = CheckSchedule(mask, list, sizes, 64, 2, cost, "a CTA alone, CTAs ");
    CHECK(PredictScheduleTime(schedule, cost) == time, alone, " %, half tiles of ", half,
          " %: ", PredictScheduleTime(schedule, cost), ", expected ", time);
  }
  CountCases(6);
}

// A window and a causal mask: each row group computes its own partial tiles and the full ones.
TEST(TileListsSkipTilesOfOtherRowGroups) {
  const ExprSizes sizes = {1, 1, 1024, 1024, 0};
  for (const auto& [text, skipped] : {std::pair("abs(q - k) <= 128", 2), std::pair("k <= q", 1)}) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 64);
    const TileList list = MakeTileList(mask);
    for (size_t r = 2; r + 2 < list.skipped.size(); ++r) {
      CHECK(list.skipped[r] == skipped, text, " row ", r, ": ", list.skipped[r]);
    }
  }
  // The first 64 rows attend every key, the others the window and the global tokens alone.
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 128, 64);
  const TileList list = MakeTileList(mask);
  CHECK(list.skipped[0] == 1024 / 64 - 4, list.skipped[0]);
  CHECK((LeadingSkips(list.code[0]) == 2 && LeadingSkips(list.code[1024 / 64 - 1]) == 0));
  CountCases(3);
}

}  // namespace
}  // namespace stof::test
