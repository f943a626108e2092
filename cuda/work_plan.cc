// SPDX-License-Identifier: Apache-2.0
#include "cuda/work_plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace stof {
namespace cuda {
namespace {

// Beside its tiles a row costs about one: queries, the first scores and the last product, which nothing covers, output.
constexpr int64_t kRowCost = 4, kFullCost = 4, kPartialCost = 5;

}  // namespace

int64_t RowCost(const BlockMask& mask, int64_t table, int64_t row) {
  const auto at = static_cast<size_t>(table * mask.rows + row);
  const int64_t partial = mask.full_begin[at] - mask.row_ptr[at], full = mask.row_ptr[at + 1] - mask.full_begin[at];
  return kRowCost + kPartialCost * partial + kFullCost * full;
}

WorkPlan PlanWork(const BlockMask& mask, int64_t B, int64_t H, int ctas, int64_t section) {
  struct Work {
    int64_t cost;
    int32_t item;
  };
  using Load = std::pair<int64_t, int>;  // of a CTA
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> least;
  for (int c = 0; c < ctas; ++c) least.emplace(0, c);
  std::vector<std::vector<int32_t>> taken(static_cast<size_t>(ctas));
  std::vector<Work> works;
  for (int64_t first = 0; first < B * H; first += section) {
    works.clear();
    for (int64_t bh = first; bh < std::min(first + section, B * H); ++bh) {
      const int64_t table = mask.TableOf(bh / H, bh % H);
      for (int64_t row = 0; row < mask.rows; ++row) {
        works.push_back({RowCost(mask, table, row), static_cast<int32_t>(bh * mask.rows + row)});
      }
    }
    std::stable_sort(works.begin(), works.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
    for (const Work& work : works) {
      const auto [load, cta] = least.top();
      least.pop();
      least.emplace(load + work.cost, cta);
      taken[static_cast<size_t>(cta)].push_back(work.item);
    }
  }
  WorkPlan plan;
  plan.begin.push_back(0);
  for (const std::vector<int32_t>& own : taken) {
    plan.items.insert(plan.items.end(), own.begin(), own.end());
    plan.begin.push_back(static_cast<int32_t>(plan.items.size()));
  }
  return plan;
}

}  // namespace cuda
}  // namespace stof
