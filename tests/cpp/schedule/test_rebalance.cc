// SPDX-License-Identifier: Apache-2.0
// Exchanges of tile rows between CTAs, and of CTAs between SMs. Needs no GPU.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "cuda/schedule/rebalance.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/schedule/schedule_checks.h"

namespace stof::test {
namespace {

using cuda::Assignment;
using cuda::BalanceSms;
using cuda::CostedTile;
using cuda::MakeTileList;
using cuda::Rebalance;
using cuda::TileCost;
using cuda::TileList;
using cuda::TileSchedule;

// Random tile rows, assigned group by group to the least loaded CTA.
struct Scheduled {
  std::vector<CostedTile> tiles;
  std::vector<std::vector<Assignment>> ctas;
};
Scheduled Schedule(Random* random, size_t ctas, size_t rows, int64_t least, int64_t most) {
  Scheduled scheduled;
  const auto groups = static_cast<size_t>(random->Range(1, 5));
  for (size_t i = 0; i < rows; ++i) {
    scheduled.tiles.push_back({random->Range(least, most), 0, {static_cast<int32_t>(i), 0, 0, 0}});
  }
  scheduled.ctas.resize(ctas);
  std::vector<int64_t> loads(ctas, 0);
  for (size_t i = 0; i < rows; ++i) {
    const auto to = static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[to] += scheduled.tiles[i].cost;
    scheduled.ctas[to].push_back({&scheduled.tiles[i], i * groups / rows, i});
  }
  return scheduled;
}

int64_t CountedOf(const std::vector<Assignment>& own, int64_t overlapped_ns) {
  int64_t sum = 0;
  for (const Assignment& one : own) sum += std::max<int64_t>(0, one.tile->cost - overlapped_ns);
  return sum;
}

// The greatest load of an SM that so many CTAs share: halfway between their mean and their greatest.
int64_t LongestOf(const std::vector<int64_t>& loads, size_t ctas_per_sm) {
  int64_t longest = 0;
  for (auto first = loads.begin(); first != loads.end(); first += static_cast<std::ptrdiff_t>(ctas_per_sm)) {
    const auto end = first + static_cast<std::ptrdiff_t>(ctas_per_sm);
    const int64_t sum = std::accumulate(first, end, int64_t{0});
    longest = std::max(longest, (sum / static_cast<int64_t>(ctas_per_sm) + *std::max_element(first, end)) / 2);
  }
  return longest;
}
int64_t LongestOf(const std::vector<std::vector<Assignment>>& ctas, size_t ctas_per_sm, int64_t overlapped_ns) {
  std::vector<int64_t> loads;
  for (const std::vector<Assignment>& own : ctas) loads.push_back(CountedOf(own, overlapped_ns));
  return LongestOf(loads, ctas_per_sm);
}

void CheckAllThere(const Scheduled& scheduled, const std::vector<size_t>& had, const std::string& where) {
  std::vector<int> seen(scheduled.tiles.size(), 0);
  for (size_t w = 0; w < scheduled.ctas.size(); ++w) {
    const std::vector<Assignment>& own = scheduled.ctas[w];
    CHECK(!own.empty() || had[w] == 0, where, ": CTA ", w, " has nothing left");
    for (size_t i = 0; i < own.size(); ++i) {
      ++seen[static_cast<size_t>(own[i].tile - scheduled.tiles.data())];
      CHECK(i == 0 || own[i - 1].group <= own[i].group, where, ": CTA ", w, " goes back a group");
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
}

std::vector<size_t> CountsOf(const Scheduled& scheduled) {
  std::vector<size_t> counts;
  for (const std::vector<Assignment>& own : scheduled.ctas) counts.push_back(own.size());
  return counts;
}

TEST(RebalanceKeepsAllTiles) {
  Random random(11);
  const int cases = 400;
  int shorter = 0, moved = 0;
  for (int i = 0; i < cases; ++i) {
    const auto ctas_per_sm = static_cast<size_t>(random.Range(1, 4));
    const size_t ctas = ctas_per_sm * static_cast<size_t>(random.Range(1, 24));
    const auto rows = static_cast<size_t>(random.Range(1, static_cast<int64_t>(8 * ctas)));
    const int64_t overlapped_ns = ctas_per_sm == 1 ? 0 : random.Range(0, 900);
    Scheduled scheduled = Schedule(&random, ctas, rows, random.Range(0, 700), random.Range(700, 9000));
    const std::string where = Text("case ", i, ", ", ctas, " CTAs, ", ctas_per_sm, " an SM, ", rows, " tile rows");
    const std::vector<size_t> had = CountsOf(scheduled);
    if (ctas_per_sm > 1) {
      const int64_t before = LongestOf(scheduled.ctas, ctas_per_sm, 0);
      BalanceSms(ctas_per_sm, &scheduled.ctas);
      CheckAllThere(scheduled, CountsOf(scheduled), where + ", paired");
      CHECK(LongestOf(scheduled.ctas, 1, 0) <= 2 * before, where);
    }
    const std::vector<size_t> paired = CountsOf(scheduled);
    const int64_t before = LongestOf(scheduled.ctas, ctas_per_sm, overlapped_ns);
    const int64_t makespan = Rebalance(ctas_per_sm, overlapped_ns, &scheduled.ctas);
    const int64_t after = LongestOf(scheduled.ctas, ctas_per_sm, overlapped_ns);
    CheckAllThere(scheduled, paired, where);
    CHECK(after <= before && makespan == after, where, ": ", after, ", says ", makespan, ", before ", before);
    CHECK(ctas_per_sm > 1 || CountsOf(scheduled) == had, where, ": CTAs with an SM of their own gave tiles away");
    shorter += after < before ? 1 : 0, moved += CountsOf(scheduled) != paired ? 1 : 0;
  }
  CHECK(shorter > cases / 2 && moved > cases / 8, shorter, " came out shorter, ", moved, " with rows moved");
  CountCases(cases);
}

// Two CTAs of one SM, one of which has nearly all tiles: they divide these between them.
TEST(RebalanceWithinAnSm) {
  Scheduled scheduled;
  for (int32_t i = 0; i < 8; ++i) scheduled.tiles.push_back({100 + i, 0, {i, 0, 0, 0}});
  scheduled.ctas.resize(2);
  for (size_t i = 0; i < 8; ++i) scheduled.ctas[i < 7 ? 0 : 1].push_back({&scheduled.tiles[i], 0, i});
  Rebalance(2, 0, &scheduled.ctas);
  const int64_t a = CountedOf(scheduled.ctas[0], 0), b = CountedOf(scheduled.ctas[1], 0);
  CHECK(std::abs(a - b) <= 10, a, " and ", b);
  CHECK(std::is_sorted(scheduled.ctas[1].begin(), scheduled.ctas[1].end(),
                       [](const Assignment& one, const Assignment& other) { return one.order < other.order; }));
  CountCases(1);
}

// Few CTAs with many tiles: the number of comparisons is bounded, and no tile is lost.
TEST(RebalanceOfFewCtasTakesLittleTime) {
  Random random(12);
  Scheduled scheduled = Schedule(&random, 8, 8192, 1, 4);
  const std::vector<size_t> had = CountsOf(scheduled);
  const int64_t before = LongestOf(scheduled.ctas, 4, 0);
  CHECK(Rebalance(4, 0, &scheduled.ctas) <= before);
  CheckAllThere(scheduled, had, "few CTAs");
  CountCases(1);
}

// The busiest CTA has tiles of group 0, as only the ninth of the others has. It is tried where CTAs share an SM; else
// only the eight least busy CTAs are.
TEST(RebalanceSearchesAllSmsWhereCtasShareThem) {
  for (const size_t ctas_per_sm : {2, 1}) {
    std::vector<CostedTile> tiles;
    for (int i = 0; i < 10; ++i) {
      for (const int64_t cost : {i == 0 ? 1000 : i == 9 ? 700 : 600, i == 0 ? 1000 : i == 9 ? 800 : 600}) {
        tiles.push_back({cost, 0, {static_cast<int32_t>(tiles.size()), 0, 0, 0}});
      }
    }
    std::vector<std::vector<Assignment>> ctas(10 * ctas_per_sm);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const size_t group = i / 2 == 0 || i / 2 == 9 ? 0 : 1;
      ctas[ctas_per_sm == 1 ? i / 2 : i].push_back({&tiles[i], group, i});
    }
    const int64_t longest = Rebalance(ctas_per_sm, 0, &ctas);
    CHECK(longest == (ctas_per_sm == 2 ? 950 : 2000), ctas_per_sm, " CTAs an SM: ", longest);
  }
  CountCases(2);
}

// With few tile rows, CTAs swap places between SMs until the loads of the SMs are balanced or no swap helps. Each CTA
// keeps its tiles.
TEST(TileSchedulesBalanceSms) {
  int cases = 0, changed = 0;
  for (const char* text : {"abs(q - k) <= 128 or k < 64 or q < 64", "k <= q", "abs(q - k) <= 128"}) {
    for (const size_t ctas_per_sm : {2, 4}) {
      const ExprSizes sizes = {1, 16, 4096, 4096, 0};
      const BlockMask mask = BuiltMask(text, sizes, 64, 64);
      const TileList list = MakeTileList(mask);
      TileCost cost = {3318, 1204, 1646};
      const std::string where = Text(text, ", ", ctas_per_sm, " CTAs an SM");
      const size_t ctas = 96 * ctas_per_sm * (4 / ctas_per_sm);  // with 2.7 tile rows each
      const auto schedule = [&](const char* name) {
        const TileSchedule made =
            CheckSchedule(mask, list, sizes, static_cast<int>(ctas), 16, cost, where + name, true);
        std::vector<std::vector<int32_t>> tiles;
        for (size_t w = 0; w < ctas; ++w) tiles.push_back(TilesOf(made, w));
        return tiles;
      };
      std::vector<std::vector<int32_t>> before = schedule(", CTAs ");
      cost.ctas_per_sm = static_cast<int>(ctas_per_sm);
      std::vector<std::vector<int32_t>> after = schedule(", balanced ");
      std::vector<int64_t> loads(ctas, 0), sums(ctas / ctas_per_sm, 0), old(ctas / ctas_per_sm, 0);
      size_t moved = 0;
      for (size_t w = 0; w < ctas; ++w) {
        for (const int32_t item : after[w]) loads[w] += CostOfRow(item, mask, list, cost);
        for (const int32_t item : before[w]) old[w / ctas_per_sm] += CostOfRow(item, mask, list, cost);
        sums[w / ctas_per_sm] += loads[w];
        moved += before[w] != after[w] ? 1 : 0;
      }
      const int64_t mean = std::accumulate(sums.begin(), sums.end(), int64_t{0}) / static_cast<int64_t>(sums.size());
      const auto busiest = static_cast<size_t>(std::max_element(sums.begin(), sums.end()) - sums.begin());
      const int64_t most = sums[busiest], most_before = *std::max_element(old.begin(), old.end());
      const bool uneven = most_before - mean > mean / 64;
      CHECK(uneven ? most <= most_before : moved == 0, where, ": ", moved, " moved, ", most, ", before ", most_before);
      changed += most < most_before ? 1 : 0;
      for (size_t i = 0; most - mean > mean / 64 && i < ctas_per_sm * ctas; ++i) {
        const size_t from = busiest * ctas_per_sm + i / ctas, to = i % ctas;
        if (to / ctas_per_sm == busiest) continue;
        const int64_t less = loads[from] - loads[to];
        CHECK(std::max(most - less, sums[to / ctas_per_sm] + less) >= most, where, ": ", from, " and ", to,
              " could change");
      }
      std::sort(before.begin(), before.end());
      std::sort(after.begin(), after.end());
      CHECK(before == after, where);
      ++cases;
    }
  }
  CHECK(changed >= 3, changed, " schedules became shorter");
  CountCases(cases);
}

// With three tile rows a CTA and more, SMs are balanced. The load of an SM is halfway between the mean and the greatest
// load of its CTAs, without most of each prologue and epilogue, which the other CTAs overlap.
TEST(TileSchedulesRebalanceSharedSms) {
  const std::string rows = "(q // 128)", keys = "(k // 128)";
  const std::string random = "(" + rows + " * 7919 + " + keys + " * 104729 + " + rows + " * " + keys + " * 31 + " +
                             rows + " * " + rows + " * 17) % 1009 % 100 < ";
  int cases = 0;
  for (const auto& [text, batches, heads, length] :
       {std::tuple(random + "12", 1, 16, 8192), std::tuple(random + "22", 1, 16, 8192),
        std::tuple(random + "12", 1, 16, 16384),
        std::tuple(std::string("abs(q - k) <= 45 or q < 45 or k < 45"), 16, 12, 2048),
        std::tuple(std::string("k <= q"), 16, 12, 2048)}) {
    for (const size_t ctas_per_sm : {2, 3}) {
      const ExprSizes sizes = {batches, heads, length, length, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 64);
      const TileList list = MakeTileList(mask);
      TileCost cost = {3627, 1006, 1080};
      cost.ctas_per_sm = static_cast<int>(ctas_per_sm);
      const size_t ctas = 132 * ctas_per_sm;
      if (static_cast<size_t>(batches * heads * mask.rows) < 3 * ctas) continue;
      const std::string where = Text(text, ", ", ctas_per_sm, " CTAs an SM, S ", length);
      const auto times = [&](bool refine) {
        const TileSchedule schedule =
            CheckSchedule(mask, list, sizes, static_cast<int>(ctas), 98304 / length, cost, where + ", CTAs ", refine);
        std::vector<int64_t> loads(ctas, 0);
        for (size_t w = 0; w < ctas; ++w) {
          for (const int32_t item : TilesOf(schedule, w)) {
            loads[w] += std::max<int64_t>(0, CostOfRow(item, mask, list, cost) - cost.row * 45 / 100);
          }
        }
        const int64_t all = std::accumulate(loads.begin(), loads.end(), int64_t{0});
        return std::pair(LongestOf(loads, ctas_per_sm), all / static_cast<int64_t>(ctas));
      };
      const auto [before, ignored] = times(false);
      const auto [after, mean] = times(true);
      CHECK(3 * (after - mean) <= 2 * (before - mean), where, ": ", after, ", scheduled ", before, ", mean ", mean);
      ++cases;
    }
  }
  CHECK(cases == 8, cases);
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
