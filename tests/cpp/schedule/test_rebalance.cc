// SPDX-License-Identifier: Apache-2.0
// Rows that workers, and multiprocessors that they share, change with each other. Needs no GPU.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "cuda/schedule/rebalance.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/schedule/schedule_checks.h"

namespace stof::test {
namespace {

using cuda::EvenOut;
using cuda::PairUp;
using cuda::Taken;
using cuda::TileCost;
using cuda::Walk;
using cuda::WalkOf;
using cuda::Work;
using cuda::WorkPlan;

// Random rows, dealt out section by section to whoever has least.
struct Dealt {
  std::vector<Work> works;
  std::vector<std::vector<Taken>> taken;
};
Dealt Deal(Random* random, size_t workers, size_t rows, int64_t least, int64_t most) {
  Dealt dealt;
  const auto sections = static_cast<size_t>(random->Range(1, 5));
  for (size_t i = 0; i < rows; ++i) {
    dealt.works.push_back({random->Range(least, most), 0, {static_cast<int32_t>(i), 0, 0, 0}});
  }
  dealt.taken.resize(workers);
  std::vector<int64_t> loads(workers, 0);
  for (size_t i = 0; i < rows; ++i) {
    const auto to = static_cast<size_t>(std::min_element(loads.begin(), loads.end()) - loads.begin());
    loads[to] += dealt.works[i].cost;
    dealt.taken[to].push_back({&dealt.works[i], i * sections / rows, i});
  }
  return dealt;
}

int64_t CountedOf(const std::vector<Taken>& own, int64_t covered) {
  int64_t sum = 0;
  for (const Taken& one : own) sum += std::max<int64_t>(0, one.work->cost - covered);
  return sum;
}

// What the busiest of the multiprocessors takes, which so many workers share: half by the sum of their loads, half by
// the greatest of them.
int64_t LongestOf(const std::vector<int64_t>& loads, size_t each) {
  int64_t longest = 0;
  for (auto first = loads.begin(); first != loads.end(); first += static_cast<std::ptrdiff_t>(each)) {
    const auto end = first + static_cast<std::ptrdiff_t>(each);
    const int64_t sum = std::accumulate(first, end, int64_t{0});
    longest = std::max(longest, (sum / static_cast<int64_t>(each) + *std::max_element(first, end)) / 2);
  }
  return longest;
}
int64_t LongestOf(const std::vector<std::vector<Taken>>& taken, size_t each, int64_t covered) {
  std::vector<int64_t> loads;
  for (const std::vector<Taken>& own : taken) loads.push_back(CountedOf(own, covered));
  return LongestOf(loads, each);
}

void CheckAllThere(const Dealt& dealt, const std::vector<size_t>& had, const std::string& where) {
  std::vector<int> seen(dealt.works.size(), 0);
  for (size_t w = 0; w < dealt.taken.size(); ++w) {
    const std::vector<Taken>& own = dealt.taken[w];
    CHECK(!own.empty() || had[w] == 0, where, ": worker ", w, " has nothing left");
    for (size_t i = 0; i < own.size(); ++i) {
      ++seen[static_cast<size_t>(own[i].work - dealt.works.data())];
      CHECK(i == 0 || own[i - 1].section <= own[i].section, where, ": worker ", w, " goes back a section");
    }
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
}

std::vector<size_t> CountsOf(const Dealt& dealt) {
  std::vector<size_t> counts;
  for (const std::vector<Taken>& own : dealt.taken) counts.push_back(own.size());
  return counts;
}

TEST(PlansKeepRowsWhereTheyChange) {
  Random random(11);
  const int cases = 400;
  int shorter = 0, moved = 0;
  for (int i = 0; i < cases; ++i) {
    const auto each = static_cast<size_t>(random.Range(1, 4));
    const size_t workers = each * static_cast<size_t>(random.Range(1, 24));
    const auto rows = static_cast<size_t>(random.Range(1, static_cast<int64_t>(8 * workers)));
    const int64_t covered = each == 1 ? 0 : random.Range(0, 900);
    Dealt dealt = Deal(&random, workers, rows, random.Range(0, 700), random.Range(700, 9000));
    const std::string where = Text("case ", i, ", ", workers, " workers, ", each, " a multiprocessor, ", rows, " rows");
    const std::vector<size_t> had = CountsOf(dealt);
    if (each > 1) {
      const int64_t before = LongestOf(dealt.taken, each, 0);
      PairUp(each, &dealt.taken);
      CheckAllThere(dealt, CountsOf(dealt), where + ", paired");
      CHECK(LongestOf(dealt.taken, 1, 0) <= 2 * before, where);
    }
    const std::vector<size_t> paired = CountsOf(dealt);
    const int64_t before = LongestOf(dealt.taken, each, covered);
    const int64_t said = EvenOut(each, covered, &dealt.taken);
    const int64_t after = LongestOf(dealt.taken, each, covered);
    CheckAllThere(dealt, paired, where);
    CHECK(after <= before && said == after, where, ": ", after, ", says ", said, ", before ", before);
    CHECK(each > 1 || CountsOf(dealt) == had, where, ": workers of their own gave rows away");
    shorter += after < before ? 1 : 0, moved += CountsOf(dealt) != paired ? 1 : 0;
  }
  CHECK(shorter > cases / 2 && moved > cases / 8, shorter, " came out shorter, ", moved, " with rows moved");
  CountCases(cases);
}

// Two workers of a multiprocessor, one with everything: they share it out between them, for there is no other.
TEST(PlansShareAmongTeams) {
  Dealt dealt;
  for (int32_t i = 0; i < 8; ++i) dealt.works.push_back({100 + i, 0, {i, 0, 0, 0}});
  dealt.taken.resize(2);
  for (size_t i = 0; i < 8; ++i) dealt.taken[i < 7 ? 0 : 1].push_back({&dealt.works[i], 0, i});
  EvenOut(2, 0, &dealt.taken);
  const int64_t a = CountedOf(dealt.taken[0], 0), b = CountedOf(dealt.taken[1], 0);
  CHECK(std::abs(a - b) <= 10, a, " and ", b);
  CHECK(std::is_sorted(dealt.taken[1].begin(), dealt.taken[1].end(),
                       [](const Taken& one, const Taken& other) { return one.place < other.place; }));
  CountCases(1);
}

// Many long workers: what is compared is bounded, and all rows are there when it ends.
TEST(PlansOfFewWorkersTakeLittleTime) {
  Random random(12);
  Dealt dealt = Deal(&random, 8, 8192, 1, 4);
  const std::vector<size_t> had = CountsOf(dealt);
  const int64_t before = LongestOf(dealt.taken, 4, 0);
  CHECK(EvenOut(4, 0, &dealt.taken) <= before);
  CheckAllThere(dealt, had, "few workers");
  CountCases(1);
}

// The busiest one has rows of the first section, as only the ninth of the others has: it is asked where workers share a
// multiprocessor; else none but the eight least busy are.
TEST(PlansLookFurtherWhereTheyShare) {
  for (const size_t each : {2, 1}) {
    std::vector<Work> works;
    for (int i = 0; i < 10; ++i) {
      for (const int64_t cost : {i == 0 ? 1000 : i == 9 ? 700 : 600, i == 0 ? 1000 : i == 9 ? 800 : 600}) {
        works.push_back({cost, 0, {static_cast<int32_t>(works.size()), 0, 0, 0}});
      }
    }
    std::vector<std::vector<Taken>> taken(10 * each);
    for (size_t i = 0; i < works.size(); ++i) {
      const size_t section = i / 2 == 0 || i / 2 == 9 ? 0 : 1;
      taken[each == 1 ? i / 2 : i].push_back({&works[i], section, i});
    }
    const int64_t longest = EvenOut(each, 0, &taken);
    CHECK(longest == (each == 2 ? 950 : 2000), each, " workers a multiprocessor: ", longest);
  }
  CountCases(2);
}

// Of few rows, workers that share a multiprocessor change places until sums are even or no change of two helps; their
// rows stay theirs.
TEST(WorkPlansPairWorkers) {
  int cases = 0, changed = 0;
  for (const char* text : {"abs(q - k) <= 128 or k < 64 or q < 64", "k <= q", "abs(q - k) <= 128"}) {
    for (const size_t teams : {2, 4}) {
      const ExprSizes sizes = {1, 16, 4096, 4096, 0};
      const BlockMask mask = BuiltMask(text, sizes, 64, 64);
      const Walk walk = WalkOf(mask);
      TileCost cost = {3318, 1204, 1646};
      const std::string where = Text(text, ", ", teams, " teams");
      const size_t workers = 96 * teams * (4 / teams);  // with 2.7 rows each
      const auto plan = [&](const char* name) {
        const WorkPlan made = CheckPlan(mask, walk, sizes, static_cast<int>(workers), 16, cost, where + name, true);
        std::vector<std::vector<int32_t>> items;
        for (size_t w = 0; w < workers; ++w) items.push_back(ItemsOf(made, w));
        return items;
      };
      std::vector<std::vector<int32_t>> before = plan(", workers ");
      cost.teams = static_cast<int>(teams);
      std::vector<std::vector<int32_t>> after = plan(", paired ");
      std::vector<int64_t> loads(workers, 0), sums(workers / teams, 0), old(workers / teams, 0);
      size_t moved = 0;
      for (size_t w = 0; w < workers; ++w) {
        for (const int32_t item : after[w]) loads[w] += CostOfRow(item, mask, walk, cost);
        for (const int32_t item : before[w]) old[w / teams] += CostOfRow(item, mask, walk, cost);
        sums[w / teams] += loads[w];
        moved += before[w] != after[w] ? 1 : 0;
      }
      const int64_t mean = std::accumulate(sums.begin(), sums.end(), int64_t{0}) / static_cast<int64_t>(sums.size());
      const auto busiest = static_cast<size_t>(std::max_element(sums.begin(), sums.end()) - sums.begin());
      const int64_t most = sums[busiest], most_before = *std::max_element(old.begin(), old.end());
      const bool uneven = most_before - mean > mean / 64;
      CHECK(uneven ? most <= most_before : moved == 0, where, ": ", moved, " moved, ", most, ", before ", most_before);
      changed += most < most_before ? 1 : 0;
      for (size_t i = 0; most - mean > mean / 64 && i < teams * workers; ++i) {
        const size_t from = busiest * teams + i / workers, to = i % workers;
        if (to / teams == busiest) continue;
        const int64_t less = loads[from] - loads[to];
        CHECK(std::max(most - less, sums[to / teams] + less) >= most, where, ": ", from, " and ", to, " could change");
      }
      std::sort(before.begin(), before.end());
      std::sort(after.begin(), after.end());
      CHECK(before == after, where);
      ++cases;
    }
  }
  CHECK(changed >= 3, changed, " plans became shorter");
  CountCases(cases);
}

// Of three rows a worker and more, multiprocessors come out even: half by the sum of their workers' loads, half by the
// greatest of them, without most of what a row's start and end take, which other workers cover.
TEST(WorkPlansShareMultiprocessors) {
  const std::string rows = "(q // 128)", keys = "(k // 128)";
  const std::string random = "(" + rows + " * 7919 + " + keys + " * 104729 + " + rows + " * " + keys + " * 31 + " +
                             rows + " * " + rows + " * 17) % 1009 % 100 < ";
  int cases = 0;
  for (const auto& [text, batches, heads, length] :
       {std::tuple(random + "12", 1, 16, 8192), std::tuple(random + "22", 1, 16, 8192),
        std::tuple(random + "12", 1, 16, 16384),
        std::tuple(std::string("abs(q - k) <= 45 or q < 45 or k < 45"), 16, 12, 2048),
        std::tuple(std::string("k <= q"), 16, 12, 2048)}) {
    for (const size_t teams : {2, 3}) {
      const ExprSizes sizes = {batches, heads, length, length, 0};
      const BlockMask mask = BuiltMask(text, sizes, 128, 64);
      const Walk walk = WalkOf(mask);
      TileCost cost = {3627, 1006, 1080};
      cost.teams = static_cast<int>(teams);
      const size_t workers = 132 * teams;
      if (static_cast<size_t>(batches * heads * mask.rows) < 3 * workers) continue;
      const std::string where = Text(text, ", ", teams, " teams, S ", length);
      const auto times = [&](bool finish) {
        const WorkPlan plan =
            CheckPlan(mask, walk, sizes, static_cast<int>(workers), 98304 / length, cost, where + ", workers ", finish);
        std::vector<int64_t> loads(workers, 0);
        for (size_t w = 0; w < workers; ++w) {
          for (const int32_t item : ItemsOf(plan, w)) {
            loads[w] += std::max<int64_t>(0, CostOfRow(item, mask, walk, cost) - cost.row * 45 / 100);
          }
        }
        const int64_t all = std::accumulate(loads.begin(), loads.end(), int64_t{0});
        return std::pair(LongestOf(loads, teams), all / static_cast<int64_t>(workers));
      };
      const auto [before, ignored] = times(false);
      const auto [after, mean] = times(true);
      CHECK(3 * (after - mean) <= 2 * (before - mean), where, ": ", after, ", dealt ", before, ", mean ", mean);
      ++cases;
    }
  }
  CHECK(cases == 8, cases);
  CountCases(cases);
}

}  // namespace
}  // namespace stof::test
