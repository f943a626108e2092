// SPDX-License-Identifier: Apache-2.0
// The C interface of tools/fit_selector.py to cuda/schedule/tile_schedule.cc: it fits costs to the very schedules that
// runs use.
#include <cstdint>
#include <memory>

#include "cuda/schedule/tile_schedule.h"

namespace {

struct MaskWithTileList {
  stof::BlockMask mask;
  stof::cuda::TileList list;
};

}  // namespace

#define STOF_PLAN_TIMES __attribute__((visibility("default")))

extern "C" {

// Copies the arrays of a block mask (plugins/core/mask/block_mask.h), in the order of its members, and makes its tile
// list. sizes: S, T, P, m, n, rows, layout_b, layout_h; counts: elements of the six arrays. Nothing is checked:
// stof_block_mask_create made them.
STOF_PLAN_TIMES void* stof_plan_mask(const int64_t sizes[8], const int64_t counts[6], const int32_t* layout,
                                     const int32_t* row_ptr, const int32_t* full_begin, const int32_t* key_tile,
                                     const int32_t* bits_id, const uint32_t* bits) {
  auto handle = std::make_unique<MaskWithTileList>();
  stof::BlockMask& mask = handle->mask;
  mask.S = sizes[0], mask.T = sizes[1], mask.P = sizes[2];
  mask.m = static_cast<int32_t>(sizes[3]), mask.n = static_cast<int32_t>(sizes[4]);
  mask.rows = static_cast<int32_t>(sizes[5]);
  mask.layout_b = static_cast<int32_t>(sizes[6]), mask.layout_h = static_cast<int32_t>(sizes[7]);
  mask.layout.assign(layout, layout + counts[0]);
  mask.row_ptr.assign(row_ptr, row_ptr + counts[1]);
  mask.full_begin.assign(full_begin, full_begin + counts[2]);
  mask.key_tile.assign(key_tile, key_tile + counts[3]);
  mask.bits_id.assign(bits_id, bits_id + counts[4]);
  mask.bits.assign(bits, bits + counts[5]);
  handle->list = stof::cuda::MakeTileList(mask);
  return handle.release();
}

STOF_PLAN_TIMES void stof_plan_mask_destroy(void* handle) { delete static_cast<MaskWithTileList*>(handle); }

// Nanoseconds by the model; costs: row, full, partial, split_kv, can_split_rows, half_tile_pct, solo_speed_pct
// (stof::cuda::TileCost).
STOF_PLAN_TIMES int64_t stof_plan_time(const void* handle, int64_t B, int64_t H, int64_t ctas, int64_t l2_heads,
                                       const int64_t costs[7]) {
  const auto& [mask, list] = *static_cast<const MaskWithTileList*>(handle);
  stof::cuda::TileCost cost;
  cost.row = costs[0], cost.full = costs[1], cost.partial = costs[2], cost.split_kv = costs[3];
  cost.can_split_rows = costs[4] != 0, cost.half_tile_pct = costs[5], cost.solo_speed_pct = costs[6];
  return PredictScheduleTime(MakeTileSchedule(mask, list, B, H, static_cast<int>(ctas), l2_heads, cost), cost);
}

}  // extern "C"
