// SPDX-License-Identifier: Apache-2.0
// What a plan's order has come from memory, by a model of the L2 cache. Needs no GPU.
#include <algorithm>
#include <list>
#include <map>
#include <tuple>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"

namespace stof::test {
namespace {

using cuda::LeadOf;
using cuda::PlanWork;
using cuda::TileCost;
using cuda::TrailOf;
using cuda::Walk;
using cuda::WalkOf;
using cuda::WorkItem;
using cuda::WorkPlan;

constexpr const char* kGlobal = "abs(q - k) <= 128 or k < 64 or q < 64";
constexpr int kWorkers = 132;
// 128 x 64 at D = 128, whose keys and values of a tile take 32 KiB.
constexpr TileCost kCost = {1278, 840, 948, 1, 0, false, 74, true, 1};
constexpr size_t kCached = (size_t{16} << 20) / (32 * 1024);  // what is left of the device's cache beside the rest

// Tiles of keys and values that do not come from a cache of so many, the least recently used of which makes room.
// Workers take the costs' times; what is drawn is taken by who is done first.
int64_t TilesFromMemory(const WorkPlan& plan, const BlockMask& mask, const Walk& walk, const TileCost& cost,
                        size_t cached) {
  std::vector<std::tuple<int64_t, int64_t, int32_t>> reads;  // when, of which head, which tile
  std::vector<int64_t> now(static_cast<size_t>(plan.workers()), 0);
  const auto take = [&](int64_t* when, const WorkItem& item) {
    *when += cost.row;
    for (int32_t at = item.begin; at < item.end; ++at) {
      const auto entry = static_cast<size_t>(at);
      reads.emplace_back(*when, item.item / mask.rows, walk.key_tile[entry]);
      const int32_t code = walk.code[entry];
      const int passed = (LeadOf(code) | TrailOf(code)) != 0 ? 1 : 0;  // by one group of two
      *when += code < 0 ? cost.full : cost.partial * (4 - passed) / 4;
    }
  };
  for (size_t w = 0; w < now.size(); ++w) {
    for (int32_t at = plan.begin[w]; at < plan.begin[w + 1]; ++at) take(&now[w], plan.items[static_cast<size_t>(at)]);
  }
  for (auto at = static_cast<size_t>(plan.begin.back()); at < plan.items.size(); ++at) {
    take(&*std::min_element(now.begin(), now.end()), plan.items[at]);
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

void CheckRowsOnce(const WorkPlan& plan, int64_t rows, const std::string& where) {
  std::vector<int> seen(static_cast<size_t>(rows), 0);
  for (const WorkItem& item : plan.items) {
    const int32_t part = cuda::PartOf(item);
    seen[static_cast<size_t>(item.item)] += part < 0 ? 3 : 1 << part;  // halves are 0 and 1
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 3; }), where);
}

struct Traffic {
  double before, after;  // tiles from memory for each that there is, as dealt out for a prediction and for a run
};
Traffic TrafficOf(const char* text, const ExprSizes& sizes, int64_t section, const TileCost& cost) {
  const BlockMask mask = BuiltMask(text, sizes, 128, 64);
  const Walk walk = WalkOf(mask);
  const auto all = static_cast<double>(sizes.B * sizes.H * (sizes.T / 64));
  double found[2];
  for (const bool finish : {false, true}) {
    const WorkPlan plan = PlanWork(mask, walk, sizes.B, sizes.H, kWorkers, section, cost, finish);
    CheckRowsOnce(plan, sizes.B * sizes.H * mask.rows, text);
    found[finish] = static_cast<double>(TilesFromMemory(plan, mask, walk, cost, kCached)) / all;
    CHECK(found[finish] >= 1.0, text, ": some tiles were never read");
  }
  return {found[0], found[1]};
}

// Rows of global tokens read all keys of their heads a second time, long before or after the other rows, unless these
// go along with them: those of two thirds of 32 heads, for the rest is over when such a row is, and of nearly all of
// more heads.
TEST(WorkPlansReadKeysOfGlobalTokensOnce) {
  TileCost halves = kCost;  // of a kernel that halves rows instead of drawing them
  halves.draws = false;
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

bool AreAlike(const WorkPlan& a, const WorkPlan& b) {
  return a.begin == b.begin &&
         std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(),
                    [](const WorkItem& x, const WorkItem& y) { return x.item == y.item && x.begin == y.begin; });
}

// Rows are dealt out as for a prediction where nothing goes beside long ones: masks that differ by head, keys that
// heads share, keys beyond the queries, heads that the cache holds together, rows beside them that are long themselves,
// and where rows come in parts.
TEST(WorkPlansGoBesideLongRowsOnlyThere) {
  TileCost cost = kCost;
  cost.draws = false;
  const auto dealt = [&](const char* text, const ExprSizes& sizes, int64_t section, int64_t sharing) {
    const BlockMask mask = BuiltMask(text, sizes, 128, 64);
    const Walk walk = WalkOf(mask);
    const WorkPlan plan = PlanWork(mask, walk, sizes.B, sizes.H, kWorkers, section, cost, true, sharing);
    return AreAlike(plan, PlanWork(mask, walk, sizes.B, sizes.H, kWorkers, section, cost));
  };
  const ExprSizes sizes = {6, 32, 8192, 8192, 0};  // more rows than workers change with each other
  CHECK(!dealt(kGlobal, sizes, 6, 1));
  CHECK(dealt(kGlobal, sizes, 6, 4));
  CHECK(dealt(kGlobal, sizes, 6 * 32, 1));
  CHECK(dealt("abs(q - k) <= 128 or k < 64 or q < 64 + 64 * (h % 2)", sizes, 6, 1));
  CHECK(dealt(kGlobal, {9, 32, 4096, 8192, 0}, 6, 1));
  CHECK(dealt("abs(q - k) <= 128 or k < 64 or q < 64 or (q % 2048 < 128 and k < 2560)", sizes, 6, 1));
  const BlockMask mask = BuiltMask(kGlobal, {1, 16, 4096, 4096, 0}, 64, 64);
  const Walk walk = WalkOf(mask);
  const TileCost parts = {3320, 1231, 1525, 1, 0, true};
  const WorkPlan plan = PlanWork(mask, walk, 1, 16, 528, 4, parts, true);
  CHECK(plan.parts() > 0 && AreAlike(plan, PlanWork(mask, walk, 1, 16, 528, 4, parts)));
  CountCases(7);
}

// Long rows of different lengths fill workers unevenly where others go beside them: not at the price of a longer run.
TEST(WorkPlansBesideLongRowsEndAsEarly) {
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
      const Walk walk = WalkOf(mask);
      const TileCost cost = n == 64 ? kCost : TileCost{2553, 1381, 1506, 1, 0, false, 74};
      const int64_t before = PlanWork(mask, walk, 1, heads, kWorkers, 2, cost).longest;
      const int64_t after = PlanWork(mask, walk, 1, heads, kWorkers, 2, cost, true).longest;
      CHECK(after - before <= before / 32, text, " by ", n, ": ", after, " instead of ", before);
      ++cases;
    }
  }
  CountCases(cases);
}

// 32 heads in sections of up to 6: two that are left for the last would have too few rows to even out what is uneven.
TEST(WorkPlansShareOutCausalRows) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  int cases = 0;
  for (const int m : {128, 192}) {
    const BlockMask mask = BuiltMask("k <= q", sizes, m, 64);
    const Walk walk = WalkOf(mask);
    const TileCost cost = {4554, 952, 1040};
    for (int64_t section = 1; section <= 32; ++section) {
      const WorkPlan plan = PlanWork(mask, walk, sizes.B, sizes.H, 132, section, cost);
      const int64_t total = PlanWork(mask, walk, sizes.B, sizes.H, 1, section, cost).longest;
      CHECK(plan.longest * 100 <= total / 132 * 102, m, " rows, section ", section, ": ", plan.longest, " of ",
            total / 132);
      ++cases;
    }
  }
  CountCases(cases);
}

// Of one worker: sections of heads one after the other, then the smallest rows of all.
TEST(WorkPlansKeepSectionsTogether) {
  const ExprSizes sizes = {1, 32, 4096, 4096, 0};
  const BlockMask mask = BuiltMask("k <= q", sizes, 128, 128);
  const WorkPlan plan = PlanWork(mask, WalkOf(mask), sizes.B, sizes.H, 1, 6, {2700, 1380, 1480});
  const auto rows = static_cast<int32_t>(mask.rows);
  size_t at = 0;
  int32_t highest = 0;
  for (int32_t section = 0; section < 6; ++section) {
    const int32_t first = 32 * section / 6, last = 32 * (section + 1) / 6;
    for (; at < plan.items.size() && plan.items[at].item / rows < last; ++at) {
      if (plan.items[at].item / rows < first) break;  // the last part has begun
      highest = std::max(highest, plan.items[at].item / rows);
    }
    CHECK(highest == last - 1, "section ", section, " ends with head ", highest);
  }
  int64_t held = 0, total = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const int64_t tiles = plan.items[i].end - plan.items[i].begin;
    total += tiles;
    if (i < at) continue;
    held += tiles;
    CHECK(tiles <= 8, "a row of ", tiles, " tiles was held back");
  }
  CHECK(held > 0 && held * 32 <= total, held, " of ", total, " tiles are held back");
  CountCases(1);
}

// The smallest rows of all heads do not come last where workers can change rows with each other, or draw them: they
// would have all keys come from memory again.
TEST(WorkPlansKeepSmallRowsWithTheirHeads) {
  const std::string random =
      "((q // 128) * 7919 + (k // 128) * 104729 + (q // 128) * (k // 128) * 31 + "
      "(q // 128) * (q // 128) * 17) % 1009 % 100 < 12";
  TileCost halves = kCost;
  halves.draws = false;
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

// What has no such rows, or rows beside them that read keys all over, is read head by head as before.
TEST(WorkPlansKeepHeadsTogetherElsewhere) {
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
