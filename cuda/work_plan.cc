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
  const auto give_out = [&] {
    std::stable_sort(works.begin(), works.end(), [](const Work& a, const Work& b) { return a.cost > b.cost; });
    for (const Work& work : works) {
      const auto [load, cta] = least.top();
      least.pop();
      least.emplace(load + work.cost, cta);
      taken[static_cast<size_t>(cta)].push_back(work.item);
    }
    works.clear();
  };
  int64_t total = 0;
  for (int64_t bh = 0; bh < B * H; ++bh) {
    for (int64_t row = 0; row < mask.rows; ++row) total += RowCost(mask, mask.TableOf(bh / H, bh % H), row);
  }
  // Rows that are a large part of a CTA's share (those of global tokens, say) come first of all: given out late, one of
  // them would be the end of the run.
  const int64_t large = std::max<int64_t>(1, total / ctas / 16);
  const auto add = [&](int64_t first, int64_t last, bool of_large) {
    for (int64_t bh = first; bh < last; ++bh) {
      const int64_t table = mask.TableOf(bh / H, bh % H);
      for (int64_t row = 0; row < mask.rows; ++row) {
        const int64_t cost = RowCost(mask, table, row);
        if ((cost > large) == of_large) works.push_back({cost, static_cast<int32_t>(bh * mask.rows + row)});
      }
    }
  };
  add(0, B * H, true);
  give_out();
  for (int64_t first = 0; first < B * H; first += section) {
    add(first, std::min(first + section, B * H), false);
    give_out();
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
