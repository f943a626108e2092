// SPDX-License-Identifier: Apache-2.0
// The plan of a persistent CUDA kernel: every row once, no worker with much more than its share. Needs no GPU.
#include <algorithm>
#include <numeric>

#include "cuda/work_plan.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/random_expr.h"

namespace stof::test {
namespace {

using cuda::PlanWork;
using cuda::TileCost;
using cuda::WorkItem;
using cuda::WorkPlan;
using cuda::WorkStart;

int64_t CostOf(const WorkItem& item, const TileCost& cost) {
  return cost.row + cost.partial * (item.full - item.begin) + cost.full * (item.end - item.full);
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
      const TileCost cost = {random.Range(1, 4000), random.Range(1, 2000), random.Range(1, 2000)};
      const WorkPlan plan = PlanWork(mask, sizes.B, sizes.H, workers, section, cost);
      const std::string where = Text(text, " S ", sizes.S, " T ", sizes.T, " workers ", workers);
      CHECK(plan.begin.size() == static_cast<size_t>(workers) + 1 && plan.begin[0] == 0, where);
      CHECK(plan.begin.back() == static_cast<int64_t>(plan.items.size()), where);
      const std::vector<WorkStart> starts = StartsOf(plan, mask);
      CHECK(starts.size() == static_cast<size_t>(workers), where);
      for (size_t w = 0; w < starts.size(); ++w) {
        const WorkStart& start = starts[w];
        CHECK(start.begin == plan.begin[w] && start.end == plan.begin[w + 1], where);
        if (start.begin == start.end) continue;
        const WorkItem& first = plan.items[static_cast<size_t>(start.begin)];
        CHECK(start.first.item == first.item && start.first.begin == first.begin, where);
        CHECK(start.first.full == first.full && start.first.end == first.end, where);
        // Each entry once, a full one first where there are others, too.
        std::vector<int32_t> order;
        for (int32_t t = 0; t < first.end - first.begin; ++t) order.push_back(cuda::EntryAt(first, t));
        if (first.begin < first.end) CHECK(order[0] >= first.full || first.full == first.end, where);
        std::vector<int32_t> sorted = order;
        std::sort(sorted.begin(), sorted.end());
        for (size_t t = 0; t < sorted.size(); ++t) CHECK(sorted[t] == first.begin + static_cast<int32_t>(t), where);
        for (size_t t = 0; t < cuda::kFirstTiles; ++t) {
          const bool there = t < order.size();
          const auto at = static_cast<size_t>(there ? order[t] : 0);
          CHECK(start.tile[t] == (there ? mask.key_tile[at] : -1), where);
          CHECK(start.code[t] == (there ? mask.bits_id[at] : -1), where);
        }
      }
      std::vector<int> seen(static_cast<size_t>(sizes.B * sizes.H * mask.rows), 0);
      int64_t total = 0, most = 0, longest = 0;
      for (int w = 0; w < workers; ++w) {
        int64_t load = 0;
        CHECK(plan.begin[static_cast<size_t>(w)] <= plan.begin[static_cast<size_t>(w) + 1], where);
        for (int32_t at = plan.begin[static_cast<size_t>(w)]; at < plan.begin[static_cast<size_t>(w) + 1]; ++at) {
          const WorkItem& item = plan.items[static_cast<size_t>(at)];
          CHECK(item.item >= 0 && item.item < static_cast<int64_t>(seen.size()), where);
          ++seen[static_cast<size_t>(item.item)];
          const int64_t bh = item.item / mask.rows;
          const auto row =
              static_cast<size_t>(mask.TableOf(bh / sizes.H, bh % sizes.H) * mask.rows + item.item % mask.rows);
          CHECK(item.begin == mask.row_ptr[row] && item.full == mask.full_begin[row], where);
          CHECK(item.end == mask.row_ptr[row + 1], where);
          load += CostOf(item, cost);
          most = std::max(most, CostOf(item, cost));
        }
        total += load;
        longest = std::max(longest, load);
      }
      CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }), where);
      CHECK(plan.longest == longest, where, ": says ", plan.longest, ", is ", longest);
      // Whoever gets a row has the least load until then, which is at most the mean.
      CHECK(longest <= total / workers + most, where, ": ", longest, " of ", total, ", largest row ", most);
      ++cases;
    }
  }
  CountCases(cases);
}

// A row of global tokens as large as a worker's share: last in line it would double the time.
TEST(WorkPlansBeginWithLargeRows) {
  const ExprSizes sizes = {1, 32, 8192, 8192, 0};
  const BlockMask mask = BuiltMask("abs(q - k) <= 128 or k < 64 or q < 64", sizes, 128, 128);
  const TileCost cost = {2200, 1655, 1900};
  const WorkPlan plan = PlanWork(mask, sizes.B, sizes.H, 132, 5, cost);
  const int64_t total = std::accumulate(plan.items.begin(), plan.items.end(), int64_t{0},
                                        [&](int64_t sum, const WorkItem& item) { return sum + CostOf(item, cost); });
  CHECK(plan.longest * 100 <= total / 132 * 110, plan.longest, " of ", total / 132);
  CountCases(1);
}

}  // namespace
}  // namespace stof::test
