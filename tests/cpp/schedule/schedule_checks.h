// SPDX-License-Identifier: Apache-2.0
// Checks that every tile schedule has to pass.
#ifndef STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_
#define STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_

#include <string>
#include <vector>

#include "cuda/schedule/tile_schedule.h"
#include "tests/cpp/fixtures.h"

namespace stof::test {

// Checks a tile list: it has every entry of each tile row once. A row group skips a tile where it has no pair in it nor
// in any before it, or behind it; a group without any pair skips nothing.
void CheckTileList(const BlockMask& mask, const cuda::TileList& list, const std::string& where);

// Makes a schedule and checks it: every tile row occurs once, whole, as two half tiles, or in splits that follow each
// other. No CTA has much more than the mean, and none is idle while there are tile rows for all.
cuda::TileSchedule CheckSchedule(const BlockMask& mask, const cuda::TileList& list, const ExprSizes& sizes, int most,
                                 int64_t l2_heads, const cuda::TileCost& cost, const std::string& name,
                                 bool refine = false);

// The tile rows of a CTA; behind the last CTA the dynamic ones.
std::vector<int32_t> TilesOf(const cuda::TileSchedule& schedule, size_t cta);

// The cost of a tile row: rounds of `split_kv` tiles; skipped tiles count where a CTA computes one tile at a time.
int64_t CostOf(const cuda::WorkTile& tile, int64_t skipped, int64_t groups, const cuda::TileCost& cost);
// The same for a whole tile row of a mask that all heads share.
int64_t CostOfRow(int32_t index, const BlockMask& mask, const cuda::TileList& list, const cuda::TileCost& cost);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_SCHEDULE_SCHEDULE_CHECKS_H_
