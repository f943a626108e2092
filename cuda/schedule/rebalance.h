// SPDX-License-Identifier: Apache-2.0
// Rebalance: improves an LPT (longest processing time first) schedule by local search, where CTAs exchange tile rows
// until their loads are nearly equal. All on the host, no work stealing at run time. Plain C++.
#ifndef STOF_CUDA_SCHEDULE_REBALANCE_H_
#define STOF_CUDA_SCHEDULE_REBALANCE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {

struct CostedTile {
  int64_t cost, head;  // head: b * H + h
  WorkTile tile;       // as a schedule encodes it
};

// A work tile in the list of one CTA.
struct Assignment {
  const CostedTile* tile;
  size_t group;  // the phase or L2 head group in which it runs
  size_t order;  // its position in the order in which LPT assigned all tiles
};

// Repeats the best exchange of two tile rows of one group between the busiest CTA and one of the least busy, while that
// lowers the makespan. Gives the makespan that remains.
//
// Where ctas_per_sm CTAs share an SM, they are `ctas_per_sm` neighbours in `ctas`, and the load of an SM counts:
// halfway between the mean and the greatest load of its CTAs, for the last CTA runs faster alone. The busiest SM may
// also exchange tiles among its own CTAs, or move a tile to another CTA without one in return. overlapped_ns: what each
// tile costs less because the other CTAs of its SM overlap it.
int64_t Rebalance(size_t ctas_per_sm, int64_t overlapped_ns, std::vector<std::vector<Assignment>>* ctas);

// Swaps whole CTAs between the busiest SM and another while that lowers the larger load of the two. All others keep
// their neighbours, which compute neighbouring tile rows and read the same keys.
void BalanceSms(size_t ctas_per_sm, std::vector<std::vector<Assignment>>* ctas);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_REBALANCE_H_
