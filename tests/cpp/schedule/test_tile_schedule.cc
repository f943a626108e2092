// SPDX-License-Identifier: Apache-2.0
// The plan of a persistent CUDA kernel: every row once, no worker with much more than its share. Needs no GPU.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/mask/random_expr.h"
#include "tests/cpp/schedule/schedule_checks.h"

namespace stof::test {
namespace {

using cuda::LeadOf;
using cuda::PlanWork;
using cuda::TileCost;
using cuda::Walk;
using cuda::WalkOf;
using cuda::WorkItem;
using cuda::WorkPlan;

TEST(WorkPlansTakeEveryRowOnce) {
  const char* const masks[] = {"k <= q", "abs(q - k) <= 40", "abs(q - k) <= 32 or k < 16 or q < 16",
                               "k <= q and (q // 64 - k // 64 < 2 or (k // 64 + h) % 3 == 0)", "k == q + 1000"};
  Random random(7);
  int cases = 0;
  for (const char* text : masks) {
    for (int i = 0; i < 12; ++i) {
      const ExprSizes sizes = {random.Range(1, 3), random.Range(1, 9), random.Range(1, 700), random.Range(1, 700), 0};
      const int m = 64 * static_cast<int>(random.Range(1, 4)), n = 32 * static_cast<int>(random.Range(1, 5));
      const BlockMask mask = BuiltMask(text, sizes, m, n);
      const int workers = static_cast<int>(random.Range(1, 40));
      const int64_t section = random.Range(1, 2 * sizes.H);
      TileCost cost = {random.Range(1, 4000), random.Range(1, 2000), random.Range(1, 2000)};
      cost.split = int64_t{1} << random.Range(0, 2);
      cost.cuts = m == 64 && cost.split == 1;
      if (m == 128 && cost.split == 1) cost.half = random.Range(50, 90);
      const Walk walk = WalkOf(mask);
      CheckWalk(mask, walk, text);
      const std::string name = Text(text, " S ", sizes.S, " T ", sizes.T, " workers ");
      CheckPlan(mask, walk, sizes, workers, section, cost, name);
      // Ten rows for each worker, so that they may change some.
      const auto few = static_cast<int>(std::max<int64_t>(1, sizes.B * sizes.H * mask.rows / 10));
      CheckPlan(mask, walk, sizes, few, section, cost, "even, " + name, true);
      cost.teams = static_cast<int>(random.Range(2, 4));
      cost.alone = random.Range(101, 100 * cost.teams);
      CheckPlan(mask, walk, sizes, few, section, cost, Text(cost.teams, " teams, ", name), true);
      CheckPlan(mask, walk, sizes, workers, section, cost, Text(cost.teams, " teams as dealt, ", name));
      cases += 4;
    }
  }
  CountCases(cases);
}

// A row of global tokens as large as a worker's share: last in line it would double the time.
TEST(WorkPlansBeginWithLargeRows) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 128, 128);
  const TileCost cost = {2200, 1655, 1900};
  const WorkPlan plan = PlanWork(mask, WalkOf(mask), sizes.B, sizes.H, 132, 5, cost);
  const int64_t total =
      std::accumulate(plan.items.begin(), plan.items.end(), int64_t{0},
                      [&](int64_t sum, const WorkItem& item) { return sum + CostOf(item, 0, 1, cost); });
  CHECK(plan.longest * 100 <= total / 132 * 110, plan.longest, " of ", total / 132);
  CountCases(1);
}

// What a plan's workers have under way together, of how many heads in the mean over its time: the L2 cache has to hold
// their keys and values.
double HeadsUnderWay(const WorkPlan& plan, const BlockMask& mask, const Walk& walk, int64_t heads,
                     const TileCost& cost) {
  std::vector<std::pair<int64_t, std::pair<int, int64_t>>> events;  // when, one more or less, of which head
  for (size_t w = 0; w + 1 < plan.begin.size(); ++w) {
    int64_t now = 0;
    for (int32_t at = plan.begin[w]; at < plan.begin[w + 1]; ++at) {
      const WorkItem& item = plan.items[static_cast<size_t>(at)];
      const int64_t bh = item.item / mask.rows;
      const auto row = static_cast<size_t>(mask.TableOf(0, bh) * mask.rows + item.item % mask.rows);
      events.push_back({now, {1, bh}});
      now += CostOf({0, item.begin, mask.full_begin[row], item.end}, walk.missing[row], mask.m / 64, cost);
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
  return sum / static_cast<double>(plan.longest);
}

// Rows of all heads at once would read keys and values of 134 MB by way of a cache of 50.
TEST(WorkPlansHaveFewHeadsUnderWay) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  const TileCost cost = {2553, 1381, 1506};
  int cases = 0;
  for (const auto& [text, most] :
       {std::pair("k <= q", 10), std::pair("abs(q - k) <= 128", 5), std::pair("k <= q and q - k < 1024", 6),
        std::pair("(31 * (q // 128) * (q // 128) + 57 * (k // 128) + 73 * (q // 128) * (k // 128)) % 101 < 12", 7)}) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 128);
    const Walk walk = WalkOf(mask);
    for (const int64_t section : {3, 6, 12}) {
      const WorkPlan plan = CheckPlan(mask, walk, sizes, 132, section, cost, Text(text, " workers "));
      const double heads = HeadsUnderWay(plan, mask, walk, sizes.H, cost);
      CHECK(heads <= most, text, " section ", section, ": ", heads, " heads under way");
      ++cases;
    }
  }
  CountCases(cases);
}

// What longest first of all rows, whatever their heads, would take.
int64_t LongestFirst(const BlockMask& mask, const Walk& walk, const ExprSizes& sizes, int workers,
                     const TileCost& cost) {
  std::vector<int64_t> costs, loads(static_cast<size_t>(workers), 0);
  for (int64_t bh = 0; bh < sizes.B * sizes.H; ++bh) {
    for (int64_t i = 0; i < mask.rows; ++i) {
      const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + i);
      const WorkItem item = {0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]};
      costs.push_back(CostOf(item, walk.missing[row], mask.m / 64, cost));
    }
  }
  std::sort(costs.rbegin(), costs.rend());
  for (const int64_t own : costs) *std::min_element(loads.begin(), loads.end()) += own;
  return *std::max_element(loads.begin(), loads.end());
}

// Sections must not keep few rows from coming out even.
TEST(WorkPlansOfFewRowsEndEarly) {
  Random random(11);
  int cases = 0;
  for (const char* text : {"k <= q", "abs(q - k) <= 40", "abs(q - k) <= 32 or k < 16 or q < 16"}) {
    for (int i = 0; i < 40; ++i) {
      const int64_t length = 128 * random.Range(1, 8);
      const ExprSizes sizes = {random.Range(1, 4), random.Range(1, 48), length, length, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 128);
      const Walk walk = WalkOf(mask);
      const int workers = random.Range(0, 1) == 0 ? 132 : 22;
      if (sizes.B * sizes.H * mask.rows >= 4 * workers) continue;
      const int64_t section = random.Range(1, 40);
      const TileCost cost = {2553, 1381, 1506};
      const int64_t best = LongestFirst(mask, walk, sizes, workers, cost);
      const WorkPlan plan = CheckPlan(mask, walk, sizes, workers, section, cost, Text(text, " workers "));
      CHECK(plan.longest * 100 <= best * 102, text, " B ", sizes.B, " H ", sizes.H, " S ", length, " section ", section,
            " workers ", workers, ": ", plan.longest, ", longest first ", best);
      ++cases;
    }
  }
  CHECK(cases >= 40, cases);
  CountCases(cases);
}

// Rows of which some workers have one more than others, and rows of which there are too few for all workers.
TEST(WorkPlansHalveRows) {
  int cases = 0;
  for (const auto& [text, heads, length, percent] :
       {std::tuple("abs(q - k) <= 128", 32, 8192, 98),
        std::tuple("abs(q - k) <= 128 or k < 64 or q < 64", 32, 8192, 99), std::tuple("abs(q - k) <= 45", 12, 2048, 85),
        std::tuple("k <= q", 12, 1024, 85), std::tuple("k <= q", 12, 128, 70)}) {
    const ExprSizes sizes = {1, heads, length, length, 0};
    const BlockMask mask = BuiltMask(text, sizes, 128, 128);
    const Walk walk = WalkOf(mask);
    TileCost cost = {2553, 1381, 1506};
    const int64_t whole = PlanWork(mask, walk, 1, heads, 132, 3, cost).longest;
    cost.half = 65;
    const WorkPlan plan = CheckPlan(mask, walk, sizes, 132, 3, cost, Text(text, " workers "));
    const auto halves = std::count_if(plan.items.begin(), plan.items.end(),
                                      [](const WorkItem& item) { return cuda::PartOf(item) >= 0; });
    CHECK(halves > 0 && halves % 2 == 0 && plan.longest * 100 <= whole * percent, text, " S ", length, ": ", halves,
          " halves, ", plan.longest, " of ", whole);
    ++cases;
  }
  CountCases(cases);
}

int32_t HeadOf(const WorkItem& item, const BlockMask& mask) { return item.item / mask.rows; }

// How often a worker goes back to an earlier head.
size_t TimesBack(const WorkPlan& plan, const BlockMask& mask) {
  size_t times = 0;
  for (size_t w = 0; w + 1 < plan.begin.size(); ++w) {
    for (auto at = static_cast<size_t>(plan.begin[w]) + 1; at < static_cast<size_t>(plan.begin[w + 1]); ++at) {
      times += HeadOf(plan.items[at], mask) < HeadOf(plan.items[at - 1], mask) ? 1 : 0;
    }
  }
  return times;
}

// Rows of 0 to 21 tiles, as random blocks have them: dealt out they end 1 to 4 % after the mean.
TEST(WorkPlansComeOutEven) {
  int cases = 0;
  for (const char* most : {"12", "22"}) {
    const std::string rows = "(q // 128)", keys = "(k // 128)";
    const std::string text = "(" + rows + " * 7919 + " + keys + " * 104729 + " + rows + " * " + keys + " * 31 + " +
                             rows + " * " + rows + " * 17) % 1009 % 100 < " + most;
    for (const int64_t heads : {16, 32}) {
      const ExprSizes sizes = {1, heads, 8192, 8192, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 128);
      const Walk walk = WalkOf(mask);
      TileCost cost = {2553, 1381, 1506};
      const int64_t mean = PlanWork(mask, walk, 1, heads, 1, 4, cost).longest / 132;
      cost.half = 74;
      const WorkPlan dealt = CheckPlan(mask, walk, sizes, 132, 4, cost, Text(text, " workers "));
      const WorkPlan even = CheckPlan(mask, walk, sizes, 132, 4, cost, Text(text, " even, workers "), true);
      const std::string where =
          Text(text, " H ", heads, ": ", even.longest, ", dealt ", dealt.longest, ", mean ", mean);
      // 7.75 rows for each worker stay as they are, 15.5 come out even.
      CHECK(heads == 16 ? even.longest == dealt.longest : even.longest < dealt.longest, where);
      CHECK(100 * (dealt.longest - mean) >= mean, where);
      CHECK(heads == 16 || 1000 * (even.longest - mean) <= 7 * mean, where);
      // Dealt out for a prediction the smallest rows of all heads come last; those that change places stay with their
      // head.
      cost.half = 0;
      const size_t before = TimesBack(PlanWork(mask, walk, 1, heads, 132, 1, cost), mask);
      const size_t after = TimesBack(PlanWork(mask, walk, 1, heads, 132, 1, cost, true), mask);
      CHECK(heads == 16 ? after == before : 2 * after <= before, where, ", back to an earlier head ", after,
            " times instead of ", before);
      ++cases;
    }
  }
  CountCases(cases);
}

// The rows that come last are left to be drawn: an eighth of the work, and given out in their order to whoever has
// least they end when the plan says, which is hardly later than dealt for a prediction.
void CheckDrawn(const WorkPlan& plan, const WorkPlan& dealt, const BlockMask& mask, const Walk& walk,
                const TileCost& cost, const std::string& where) {
  const auto workers = static_cast<size_t>(plan.workers());
  int64_t total = 0, drawn = 0, largest = 0;
  std::vector<int64_t> loads(workers, 0);
  for (size_t w = 0; w < workers; ++w) {
    for (const int32_t item : ItemsOf(plan, w)) loads[w] += CostOfRow(item, mask, walk, cost);
    total += loads[w];
  }
  for (const int32_t item : ItemsOf(plan, workers)) {
    const int64_t one = CostOfRow(item, mask, walk, cost);
    const auto least = static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[least] += one;
    total += one, drawn += one, largest = std::max(largest, one);
  }
  CHECK(8 * drawn <= total && 10 * drawn >= total, where, ": ", drawn, " of ", total);
  CHECK(12 * largest <= total / plan.workers(), where, ": one of ", largest);
  const int64_t longest = *std::max_element(loads.begin(), loads.end());
  CHECK(plan.longest == longest, where, ": says ", plan.longest, ", is ", longest);
  CHECK(plan.longest - dealt.longest <= dealt.longest / 32, where, ": ", plan.longest, ", dealt ", dealt.longest);
}

TEST(WorkPlansLeaveRowsToBeDrawn) {
  CHECK(WorkPlan().drawn() == 0);  // as masks without a plan have it
  int cases = 0;
  for (const char* text : {"abs(q - k) <= 128", "abs(q - k) <= 128 or k < 64 or q < 64", "k <= q and q - k < 700"}) {
    for (const int64_t heads : {17, 32, 64}) {
      for (const int64_t section : {1, 5, 64}) {
        const ExprSizes sizes = {1, heads, 8192, 8192, 0};
        const BlockMask mask = BuiltMask(text, sizes, 128, 64);
        const Walk walk = WalkOf(mask);
        TileCost cost = {1278, 840, 948};
        cost.draws = true;
        const std::string where = Text(text, " H ", heads, " section ", section);
        const WorkPlan dealt = CheckPlan(mask, walk, sizes, 132, section, cost, where + ", dealt, workers ");
        const WorkPlan plan = CheckPlan(mask, walk, sizes, 132, section, cost, where + ", workers ", true);
        CHECK(dealt.drawn() == 0, where);
        // Rows of 17 heads are an eighth of a worker's share each.
        CHECK((plan.drawn() == 0) == (heads == 17), where, ": ", plan.drawn(), " drawn");
        if (plan.drawn() > 0) CheckDrawn(plan, dealt, mask, walk, cost, where);
        ++cases;
      }
    }
  }
  // Nor are rows drawn less for the smallest ones' sake, which are short enough where the last ones of all heads are
  // not.
  for (const auto& [heads, length] : {std::pair(24, 16384), std::pair(48, 8192)}) {
    const ExprSizes sizes = {1, heads, length, length, 0};
    const BlockMask mask = BuiltMask("k <= q", sizes, 128, 64);
    TileCost cost = {1278, 840, 948};
    cost.draws = true;
    const WorkPlan plan = PlanWork(mask, WalkOf(mask), 1, heads, 132, 6 * 8192 / length, cost, true);
    CHECK(plan.drawn() > 500, heads, " heads: ", plan.drawn());
    ++cases;
  }
  // Rows are halved or drawn, not both; and not drawn where they are long, for a worker draws while it is at a row.
  int64_t drawn = 0, halved = 0;
  for (const char* text : {"abs(q - k) <= 128", "k <= q and q - k < 700", "q % 1000 == k % 1000", "k <= q"}) {
    for (const int64_t heads : {18, 20, 22, 23, 25, 32}) {
      const ExprSizes sizes = {1, heads, 8192, 8192, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 64);
      TileCost cost = {1278, 840, 948};
      cost.draws = true, cost.half = 74;
      const std::string where = Text(text, " H ", heads);
      const WorkPlan plan = CheckPlan(mask, WalkOf(mask), sizes, 132, 4, cost, where + ", halves, workers ", true);
      const bool half = std::any_of(plan.items.begin(), plan.items.end(),
                                    [](const WorkItem& item) { return cuda::PartOf(item) >= 0; });
      CHECK(!half || plan.drawn() == 0, where, ": ", plan.drawn(), " drawn beside halves");
      CHECK(text != std::string("k <= q") || plan.drawn() == 0, where, ": ", plan.drawn(), " long ones drawn");
      halved += half ? 1 : 0, drawn += plan.drawn() > 0 ? 1 : 0;
      ++cases;
    }
  }
  CHECK(halved > 2 && drawn > 2, halved, " plans with halves, ", drawn, " with rows to draw");
  CountCases(cases);
}

// So many that a plan is made once, by the smallest sections, and stays as it is dealt.
TEST(WorkPlansOfManyRows) {
  const ExprSizes sizes = {9, 32, 16384, 16384, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 64", sizes, 64, 64);
  const Walk walk = WalkOf(mask);
  for (const int64_t section : {1, 2, 3, 4, 5, 8, 40}) {
    const WorkPlan plan = CheckPlan(mask, walk, sizes, 132, section, {2553, 1381, 1506}, "many rows, workers ", true);
    CHECK(plan.items.size() == 73728, "section ", section, ": ", plan.items.size());
    const WorkPlan dealt = PlanWork(mask, walk, sizes.B, sizes.H, 132, section, {2553, 1381, 1506});
    CHECK(
        plan.begin == dealt.begin && std::equal(plan.items.begin(), plan.items.end(), dealt.items.begin(),
                                                [](const WorkItem& a, const WorkItem& b) { return a.item == b.item; }),
        "section ", section, ": rows changed");
  }
  CountCases(7);
}

// Rows of global tokens, which are a tenth of the work and one of them longer than the mean: in parts.
TEST(WorkPlansCutLongRows) {
  TileCost cost = {3320, 1231, 1525};
  const ExprSizes sizes = {1, 16, 4096, 4096, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 64, 64);
  const Walk walk = WalkOf(mask);
  const int64_t whole = PlanWork(mask, walk, sizes.B, sizes.H, 528, 16, cost).longest;
  cost.cuts = true;
  const WorkPlan plan = CheckPlan(mask, walk, sizes, 528, 16, cost, "longformer, workers ");
  CHECK(plan.cut.size() == 16 && 2 * plan.longest < whole, plan.cut.size(), " rows, ", plan.longest, " of ", whole);
  cost.teams = 4, cost.alone = 250;
  CheckPlan(mask, walk, sizes, 528, 16, cost, "longformer, four teams, workers ");
  cost.teams = 1, cost.alone = 100;
  // Where all rows are alike and there are enough of them nothing is cut.
  const BlockMask band = BuiltMask("abs(q - k) <= 128", sizes, 64, 64);
  CHECK(CheckPlan(band, WalkOf(band), sizes, 528, 16, cost, "window, workers ").cut.empty());
  // More parts than there may be, of 64 heads: rows stay whole.
  const ExprSizes many = {8, 16, 4096, 4096, 0};
  CHECK(CheckPlan(mask, walk, many, 40000, 16, cost, "many, workers ").cut.empty());
  CountCases(4);
}

// A row of all keys beside short ones: the model has the worker that is left with it, or with a half of it, as much
// faster as one is that has its multiprocessor to itself.
TEST(WorkPlansOfWhoIsLeftAlone) {
  const ExprSizes sizes = {1, 2, 1024, 1024, 0};
  const BlockMask mask = BuiltMask("q < 128 or k == q", sizes, 128, 64);
  const Walk walk = WalkOf(mask);
  TileCost cost = {1000, 500, 500};
  cost.teams = 2;
  // One of 16 tiles and seven of two, each of which one group passes over: 250 less.
  const int64_t mean = (9000 + 7 * 1750) / 8;
  for (const auto& [alone, half, time] :
       {std::tuple(100, 0, int64_t{9000}), std::tuple(150, 0, int64_t{6000}), std::tuple(150, 80, int64_t{4800}),
        std::tuple(200, 0, int64_t{4500}), std::tuple(400, 0, mean), std::tuple(400, 80, mean)}) {
    cost.alone = alone, cost.half = half;
    const WorkPlan plan = CheckPlan(mask, walk, sizes, 64, 2, cost, "left alone, workers ");
    CHECK(TimeOf(plan, cost) == time, alone, " %, halves of ", half, " %: ", TimeOf(plan, cost), ", expected ", time);
  }
  CountCases(6);
}

// The diagonal band of a window and a causal one: no group has more than its own tiles and the full ones' turn.
TEST(WorkPlansPassOverWhatIsOthers) {
  const ExprSizes sizes = {1, 1, 1024, 1024, 0};
  for (const auto& [text, missing] : {std::pair("abs(q - k) <= 128", 2), std::pair("k <= q", 1)}) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 64);
    const Walk walk = WalkOf(mask);
    for (size_t r = 2; r + 2 < walk.missing.size(); ++r) {
      CHECK(walk.missing[r] == missing, text, " row ", r, ": ", walk.missing[r]);
    }
  }
  // Rows of which the first 64 see every key: the others are at work in the window and the global tokens alone.
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 128, 64);
  const Walk walk = WalkOf(mask);
  CHECK(walk.missing[0] == 1024 / 64 - 4, walk.missing[0]);
  CHECK((LeadOf(walk.code[0]) == 2 && LeadOf(walk.code[1024 / 64 - 1]) == 0));
  CountCases(3);
}

}  // namespace
}  // namespace stof::test
