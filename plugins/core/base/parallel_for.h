// SPDX-License-Identifier: Apache-2.0
// A parallel loop with work stealing.
#ifndef STOF_PLUGINS_CORE_BASE_PARALLEL_FOR_H_
#define STOF_PLUGINS_CORE_BASE_PARALLEL_FOR_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "plugins/core/base/types.h"

namespace stof {

constexpr int64_t kMostTasks = 64;

// Tasks of a loop: no more than threads and iterations, and at most kMostTasks.
inline int64_t CountTasks(const Parallel& parallel, int64_t count, int64_t wanted) {
  if (parallel.run == nullptr) return 1;
  return std::max<int64_t>(1, std::min({wanted, count, kMostTasks, int64_t{parallel.threads}}));
}

// Runs function(i, task) for i in [0, count), with task < CountTasks(parallel, count, wanted_tasks). A task has
// contiguous iterations, so that it prefetches what it reads next. When it is done, it steals iterations of other
// tasks.
template <typename Function>
void ParallelFor(const Parallel& parallel, int64_t count, int64_t wanted_tasks, const Function& function) {
  const int64_t tasks = CountTasks(parallel, count, wanted_tasks);
  if (tasks == 1) {
    for (int64_t i = 0; i < count; ++i) function(i, int64_t{0});
    return;
  }
  struct alignas(64) Range {  // a cache line each
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  struct Loop {
    const Function* function;
    int64_t tasks;
    Range ranges[kMostTasks];
  } loop;
  loop.function = &function;
  loop.tasks = tasks;
  for (int64_t task = 0; task < tasks; ++task) {
    loop.ranges[task].next = count * task / tasks;
    loop.ranges[task].end = count * (task + 1) / tasks;
  }
  parallel.run(
      parallel.self,
      [](void* user, size_t index) {
        auto* const l = static_cast<Loop*>(user);
        const auto task = static_cast<int64_t>(index);
        for (int64_t n = 0; n < l->tasks; ++n) {
          Range& range = l->ranges[(task + n) % l->tasks];
          for (int64_t i = range.next.fetch_add(1); i < range.end; i = range.next.fetch_add(1)) (*l->function)(i, task);
        }
      },
      static_cast<size_t>(tasks), &loop);
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BASE_PARALLEL_FOR_H_
