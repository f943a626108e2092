// SPDX-License-Identifier: Apache-2.0
// Makes a plan of rows that were dealt out one after the other come out even. Plain C++.
#ifndef STOF_CUDA_SCHEDULE_REBALANCE_H_
#define STOF_CUDA_SCHEDULE_REBALANCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {

// What one worker does without a break.
struct Work {
  int64_t cost, head;  // head: b * H + h
  WorkItem item;       // with the `full` of a plan
};

// What a worker takes, in which section and as which of all.
struct Taken {
  const Work* work;
  size_t section, place;
};

// Dealt out one after the other rows come out as uneven as the last of them are long. The busiest worker changes a row
// of a section with one of the least busy, as long as that makes the plan shorter. Where `each` workers share a
// multiprocessor, the busiest of these does so, with any other and among its workers, or one of its workers gives a row
// away, not its last; its time is halfway between the mean and the greatest of its workers' loads, for who ends last
// has it alone then. covered: of each row's nanoseconds, what the other workers of a multiprocessor cover. Returned is
// what the busiest has in the end. `taken` is of a multiple of `each` workers, each in the order of sections.
int64_t EvenOut(size_t each, int64_t covered, std::vector<std::vector<Taken>>* taken);

// Makes multiprocessors have about as much as each other: the busiest and another change a worker each, so that both
// have least, as long as that helps. All others stay where they are, for neighbours take rows that are neighbours,
// whose keys are the same.
void PairUp(size_t each, std::vector<std::vector<Taken>>* taken);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_REBALANCE_H_
