// SPDX-License-Identifier: Apache-2.0
// The plan of a persistent CUDA kernel: every row once, no worker with much more than its share. Needs no GPU.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "cuda/work_plan.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/random_expr.h"

namespace stof::test {
namespace {

using cuda::LeadOf;
using cuda::LeastOfPlan;
using cuda::PlanWork;
using cuda::TileCost;
using cuda::Walk;
using cuda::WalkOf;
using cuda::WorkItem;
using cuda::WorkPlan;
using cuda::WorkStart;

// Rounds of tiles where `split` teams share them; what groups pass over counts where they do not.
int64_t CostOf(const WorkItem& item, int64_t missing, int64_t groups, const TileCost& cost) {
  const int64_t partial = (item.full - item.begin + cost.split - 1) / cost.split;
  const int64_t all = (item.end - item.begin + cost.split - 1) / cost.split;
  return cost.row + cost.partial * partial + cost.full * (all - partial) -
         (cost.split == 1 ? cost.partial * missing / (2 * groups) : 0);
}

// Whether 64 rows have a pair in a tile of bits; -1 has all.
bool HasPairs(const BlockMask& mask, int32_t id, int group) {
  if (id < 0) return true;
  const auto words = static_cast<size_t>(mask.n / 32), rows = static_cast<size_t>(mask.m);
  const uint32_t* bits = mask.bits.data() + (static_cast<size_t>(id) * rows + 64 * static_cast<size_t>(group)) * words;
  return std::any_of(bits, bits + 64 * words, [](uint32_t word) { return word != 0; });
}

// Each row's entries once; groups are said to be passed over where they have no pair until then, or from then on, and
// never by all of a row.
void CheckWalk(const BlockMask& mask, const Walk& walk, const std::string& where) {
  const int groups = mask.m / 64;
  for (size_t r = 0; r < mask.full_begin.size(); ++r) {
    const int32_t begin = mask.row_ptr[r], end = mask.row_ptr[r + 1];
    std::vector<std::pair<int32_t, int32_t>> given, walked;
    int64_t missing = 0;
    for (int32_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      given.emplace_back(mask.key_tile[at], mask.bits_id[at]);
      walked.emplace_back(walk.key_tile[at], walk.code[at] < 0 ? -1 : walk.code[at] & cuda::kIdMask);
    }
    for (int g = 0; g < groups; ++g) {
      const auto has = [&](const std::pair<int32_t, int32_t>& entry) { return HasPairs(mask, entry.second, g); };
      const auto first = std::find_if(walked.begin(), walked.end(), has) - walked.begin();
      const auto last = walked.rend() - std::find_if(walked.rbegin(), walked.rend(), has) - 1;
      for (int32_t i = 0; i < end - begin; ++i) {
        const int32_t code = walk.code[static_cast<size_t>(begin + i)];
        const bool any = first < end - begin;
        CHECK((cuda::LeadOf(code) >> g & 1) == (any && i < first ? 1 : 0), where, " row ", r, " entry ", i);
        CHECK((cuda::TrailOf(code) >> g & 1) == (any && i > last ? 1 : 0), where, " row ", r, " entry ", i);
        if (any && (i < first || i > last)) ++missing;
      }
    }
    CHECK(walk.missing[r] == missing, where, " row ", r);
    std::sort(given.begin(), given.end());
    std::sort(walked.begin(), walked.end());
    CHECK(given == walked, where, " row ", r);
  }
}

// Every row once, or in parts that follow each other and hold its entries once; nobody has much more than the mean.
WorkPlan CheckPlan(const BlockMask& mask, const Walk& walk, const ExprSizes& sizes, int most, int64_t section,
                   const TileCost& cost, const std::string& name, bool finish = false) {
  const WorkPlan plan = PlanWork(mask, walk, sizes.B, sizes.H, most, section, cost, finish);
  const int workers = plan.workers();
  const std::string where = Text(name, workers, " of ", most, ", ", plan.parts(), " parts");
  CHECK(workers >= 1 && workers <= most && plan.begin[0] == 0, where);
  CHECK(workers == most || workers == std::max<int64_t>(1, static_cast<int64_t>(plan.items.size())), where);
  CHECK(plan.drawn() >= 0 && (plan.drawn() == 0 || (finish && cost.draws)), where, ": ", plan.drawn(), " are drawn");
  const std::vector<WorkStart> starts = StartsOf(plan, walk);
  CHECK(starts.size() == static_cast<size_t>(workers), where);
  for (size_t w = 0; w < starts.size(); ++w) {
    const WorkStart& start = starts[w];
    CHECK(start.begin == plan.begin[w] && start.end == plan.begin[w + 1], where);
    if (start.begin == start.end) continue;
    const WorkItem& first = plan.items[static_cast<size_t>(start.begin)];
    CHECK(start.first.item == first.item && start.first.begin == first.begin, where);
    CHECK(start.first.full == first.full && start.first.end == first.end, where);
    for (size_t t = 0; t < cuda::kFirstTiles; ++t) {
      const bool there = first.begin + static_cast<int32_t>(t) < first.end;
      const auto at = static_cast<size_t>(there ? first.begin + static_cast<int32_t>(t) : 0);
      CHECK(start.tile[t] == (there ? walk.key_tile[at] : -1), where);
      CHECK(start.code[t] == (there && walk.code[at] >= 0 ? walk.code[at] & cuda::kIdMask : -1), where);
    }
  }
  // Of every row how often it is there, and of every part its item.
  std::vector<int> seen(static_cast<size_t>(sizes.B * sizes.H * mask.rows), 0);
  std::vector<const WorkItem*> parts(static_cast<size_t>(plan.parts()), nullptr);
  std::vector<int> halves(seen.size(), 0);  // a bit for each group
  int64_t total = 0, largest = 0, longest = 0;
  // What is drawn comes behind the workers'; each of these has a row of its own then.
  for (int w = 0; w <= workers; ++w) {
    int64_t load = 0;
    const int32_t begin = plan.begin[static_cast<size_t>(w)];
    const int32_t end = w < workers ? plan.begin[static_cast<size_t>(w) + 1] : static_cast<int32_t>(plan.items.size());
    const bool may_be_empty = w == workers || plan.items.size() < static_cast<size_t>(workers);
    CHECK(begin < end || (begin == end && may_be_empty), where, ": nothing for worker ", w);
    for (int32_t at = begin; at < end; ++at) {
      const WorkItem& item = plan.items[static_cast<size_t>(at)];
      CHECK(item.item >= 0 && item.item < static_cast<int64_t>(seen.size()), where);
      const int64_t bh = item.item / mask.rows;
      const auto row =
          static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + item.item % mask.rows);
      int64_t own = CostOf({0, item.begin, mask.full_begin[row], item.end}, walk.missing[row], mask.m / 64, cost);
      const int32_t part = cuda::PartOf(item);
      if (part < 0) {
        ++seen[static_cast<size_t>(item.item)];
        CHECK(item.begin == mask.row_ptr[row] && item.end == mask.row_ptr[row + 1] && item.full == item.end, where);
      } else if (cost.half > 0) {
        CHECK(part < 2 && (halves[static_cast<size_t>(item.item)] >> part & 1) == 0, where, " half ", part);
        halves[static_cast<size_t>(item.item)] |= 1 << part;
        CHECK(item.begin >= mask.row_ptr[row] && item.end <= mask.row_ptr[row + 1], where, " half ", part);
        own = cost.row;
        bool some = false;
        for (int32_t i = mask.row_ptr[row]; i < mask.row_ptr[row + 1]; ++i) {
          const int32_t code = walk.code[static_cast<size_t>(i)];
          const bool has = HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, part);
          const bool taken = i >= item.begin && i < item.end;
          some = some || has;
          CHECK(taken || !has, where, " half ", part, " of item ", item.item, " lacks entry ", i);
          if (taken) own += code < 0 ? cost.full : cost.partial;
        }
        // It has no others at its ends, but where it has none at all.
        if (some) {
          for (const int32_t end : {item.begin, item.end - 1}) {
            const int32_t code = walk.code[static_cast<size_t>(end)];
            CHECK(HasPairs(mask, code < 0 ? -1 : code & cuda::kIdMask, part), where, " half ", part, " entry ", end);
          }
        }
        own = own * cost.half / 100;
        if (halves[static_cast<size_t>(item.item)] == 3) ++seen[static_cast<size_t>(item.item)];
      } else {
        CHECK(part < plan.parts() && parts[static_cast<size_t>(part)] == nullptr, where, " part ", part);
        parts[static_cast<size_t>(part)] = &item;
        const auto bits = std::count_if(walk.code.begin() + item.begin, walk.code.begin() + item.end,
                                        [](int32_t code) { return code >= 0; });
        own = cost.row + cost.partial * bits + cost.full * (item.end - item.begin - bits);
      }
      load += own;
      largest = std::max(largest, own);
    }
    total += load;
    if (w < workers) longest = std::max(longest, load);
  }
  int32_t next = 0;
  for (const cuda::CutRow& cut : plan.cut) {
    const int64_t bh = cut.item / mask.rows;
    const auto row = static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + cut.item % mask.rows);
    CHECK(cut.first == next && cut.count >= 2 && cut.count <= cuda::kMostPartsOfRow, where, " cut row ", cut.item);
    int32_t entry = mask.row_ptr[row];
    for (int32_t i = 0; i < cut.count; ++i) {
      const WorkItem* item = parts[static_cast<size_t>(next++)];
      CHECK(item != nullptr && item->item == cut.item && item->begin == entry, where, " part ", next - 1);
      CHECK(item->end - item->begin >= cuda::kFewestTilesOfPart, where, " part ", next - 1);
      entry = item->end;
    }
    CHECK(entry == mask.row_ptr[row + 1], where, " cut row ", cut.item);
    ++seen[static_cast<size_t>(cut.item)];
  }
  CHECK(next == plan.parts() && next <= cuda::kMostParts, where);
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
  // Workers that share a multiprocessor change rows once more when the plan is made.
  const bool shared = finish && cost.teams > 1;
  CHECK(shared                                  ? 5 * std::abs(plan.longest - longest) <= longest
        : plan.cut.empty() && plan.drawn() == 0 ? plan.longest == longest
                                                : plan.longest > longest,
        where, ": says ", plan.longest, ", is ", longest);
  const int64_t least = LeastOfPlan(mask, sizes.B, sizes.H, most, cost);
  CHECK(least <= plan.longest, where, ": ", plan.longest, ", at least ", least);
  // Whoever gets a row has the least load until then, which is at most the mean.
  CHECK(longest <= total / workers + largest, where, ": ", longest, " of ", total, ", largest row ", largest);
  return plan;
}

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
      CheckPlan(mask, walk, sizes, few, section, cost, Text(cost.teams, " teams, ", name), true);
      cases += 3;
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

// The rows of a worker, or behind the last one those that are drawn.
std::vector<int32_t> ItemsOf(const WorkPlan& plan, size_t w) {
  std::vector<int32_t> found;
  const auto end = w + 1 < plan.begin.size() ? static_cast<size_t>(plan.begin[w + 1]) : plan.items.size();
  for (auto at = static_cast<size_t>(plan.begin[w]); at < end; ++at) found.push_back(plan.items[at].item);
  return found;
}

// What a worker needs for a whole row of a mask that is the same for all heads.
int64_t CostOfRow(int32_t item, const BlockMask& mask, const Walk& walk, const TileCost& cost) {
  const auto row = static_cast<size_t>(item % mask.rows);
  return CostOf({0, mask.row_ptr[row], mask.full_begin[row], mask.row_ptr[row + 1]}, walk.missing[row], mask.m / 64,
                cost);
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
        int64_t longest = 0, all = 0;
        for (size_t w = 0; w < workers; w += teams) {
          int64_t sum = 0, most = 0;
          for (size_t i = w; i < w + teams; ++i) {
            int64_t load = 0;
            for (const int32_t item : ItemsOf(plan, i)) {
              load += std::max<int64_t>(0, CostOfRow(item, mask, walk, cost) - cost.row * 45 / 100);
            }
            sum += load, most = std::max(most, load);
          }
          all += sum;
          longest = std::max(longest, (sum / static_cast<int64_t>(teams) + most) / 2);
        }
        return std::pair(longest, all / static_cast<int64_t>(workers));
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
  // Where all rows are alike and there are enough of them nothing is cut.
  const BlockMask band = BuiltMask("abs(q - k) <= 128", sizes, 64, 64);
  CHECK(CheckPlan(band, WalkOf(band), sizes, 528, 16, cost, "window, workers ").cut.empty());
  // More parts than there may be, of 64 heads: rows stay whole.
  const ExprSizes many = {8, 16, 4096, 4096, 0};
  CHECK(CheckPlan(mask, walk, many, 40000, 16, cost, "many, workers ").cut.empty());
  CountCases(3);
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
