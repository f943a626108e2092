// SPDX-License-Identifier: Apache-2.0
// What every plan of a persistent CUDA kernel has to be, whatever it is made for.
#ifndef STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_
#define STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_

#include <string>
#include <vector>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"

namespace stof::test {

// Each row's entries once; groups are said to be passed over where they have no pair until then, or from then on, and
// never by all of a row.
void CheckWalk(const BlockMask& mask, const cuda::Walk& walk, const std::string& where);

// A plan that was checked: every row once, or in parts that follow each other and hold its entries once; nobody has
// much more than the mean, and none nothing while there are rows for all.
cuda::WorkPlan CheckPlan(const BlockMask& mask, const cuda::Walk& walk, const ExprSizes& sizes, int most,
                         int64_t section, const cuda::TileCost& cost, const std::string& name, bool finish = false);

// The rows of a worker, or behind the last one those that are drawn.
std::vector<int32_t> ItemsOf(const cuda::WorkPlan& plan, size_t w);

// What a worker needs for a row: rounds of tiles where `split` teams share them; what groups pass over counts where
// they do not.
int64_t CostOf(const cuda::WorkItem& item, int64_t missing, int64_t groups, const cuda::TileCost& cost);
// The same for a whole row of a mask that is the same for all heads.
int64_t CostOfRow(int32_t item, const BlockMask& mask, const cuda::Walk& walk, const cuda::TileCost& cost);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_
