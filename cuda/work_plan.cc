// SPDX-License-Identifier: Apache-2.0
#include "cuda/work_plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace stof {
namespace cuda {
namespace {

WorkItem ItemOf(const BlockMask& mask, int64_t H, int64_t bh, int64_t row) {
  const auto at = static_cast<size_t>(mask.TableOf(bh / H, bh % H) * mask.rows + row);
  return {static_cast<int32_t>(bh * mask.rows + row), mask.row_ptr[at], mask.full_begin[at], mask.row_ptr[at + 1]};
}

int64_t CostOf(const WorkItem& work, const TileCost& cost) {
  const int64_t all = (work.end - work.begin + cost.split - 1) / cost.split;
  const int64_t partial = (work.full - work.begin + cost.split - 1) / cost.split;
  return cost.row + cost.partial * partial + cost.full * (all - partial);
}

constexpr int64_t kMostPlanned = int64_t{1} << 20;

}  // namespace

bool IsPlanned(const BlockMask& mask, int64_t B, int64_t H) { return B * H * mask.rows <= kMostPlanned; }

WorkPlan PlanWork(const BlockMask& mask, int64_t B, int64_t H, int workers, int64_t section, const TileCost& cost) {
  struct Work {
    int64_t cost;
    WorkItem item;
  };
  using Load = std::pair<int64_t, int>;  // of a worker
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
  for (int w = 0; w < workers; ++w) least.emplace(0, w);
  std::vector<std::vector<WorkItem>> taken(static_cast<size_t>(workers));
  WorkPlan plan;
  std::vector<Work> works;
  const auto give_out = [&] {
    std::stable_sort(works.begin(), works.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
    for (const Work& work : works) {
      const auto [load, worker] = least.top();
      least.pop();
      least.emplace(load + work.cost, worker);
      plan.longest = std::max(plan.longest, load + work.cost);
      taken[static_cast<size_t>(worker)].push_back(work.item);
    }
    works.clear();
  };
  int64_t total = 0;
  for (int64_t bh = 0; bh < B * H; ++bh) {
    for (int64_t row = 0; row < mask.rows; ++row) total += CostOf(ItemOf(mask, H, bh, row), cost);
  }
  // Rows that are a large part of a worker's share (those of global tokens, say) come first of all: given out late, one
  // of them would be the end of the run. They come from all heads at once, whose keys and values do not fit the L2
  // cache together, so no more of them than have to: a sixteenth of a share were all rows of 32 heads of 64 rows each.
  const int64_t large = std::max<int64_t>(1, total / workers / 4);
  const auto add = [&](int64_t first, int64_t last, bool of_large) {
    for (int64_t bh = first; bh < last; ++bh) {
      for (int64_t row = 0; row < mask.rows; ++row) {
        const WorkItem item = ItemOf(mask, H, bh, row);
        const int64_t own = CostOf(item, cost);
        if ((own > large) == of_large) works.push_back({own, item});
      }
    }
  };
  add(0, B * H, true);
  give_out();
  for (int64_t first = 0; first < B * H; first += section) {
    add(first, std::min(first + section, B * H), false);
    give_out();
  }
  plan.begin.push_back(0);
  for (const std::vector<WorkItem>& own : taken) {
    plan.items.insert(plan.items.end(), own.begin(), own.end());
    plan.begin.push_back(static_cast<int32_t>(plan.items.size()));
  }
  return plan;
}

std::vector<WorkStart> StartsOf(const WorkPlan& plan, const BlockMask& mask) {
  std::vector<WorkStart> starts;
  for (size_t worker = 0; worker + 1 < plan.begin.size(); ++worker) {
    WorkStart start = {};
    start.begin = plan.begin[worker];
    start.end = plan.begin[worker + 1];
    if (start.begin < start.end) start.first = plan.items[static_cast<size_t>(start.begin)];
    for (int i = 0; i < kFirstTiles; ++i) {
      const bool there = i < start.first.end - start.first.begin;
      const auto at = static_cast<size_t>(there ? EntryAt(start.first, i) : 0);
      start.tile[i] = there ? mask.key_tile[at] : -1;
      start.code[i] = there ? mask.bits_id[at] : -1;
    }
    starts.push_back(start);
  }
  return starts;
}

}  // namespace cuda
}  // namespace stof
