// SPDX-License-Identifier: Apache-2.0
// The workspace of the sm90 kernels: split rows of a tile schedule, or chosen blocks.
#include <algorithm>

#include "cuda/attention/choose_blocks/layout.h"
#include "cuda/attention/int8/precision.h"
#include "cuda/attention/workspace_bounds.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

namespace {

// Whatever the mask, a schedule has no more splits. Only static masks have a schedule.
int64_t BoundSplitBytes(const AttentionArgs& args, const AttentionMask& mask) {
  const AttentionShape& shape = args.shape;
  const int64_t size = std::max(shape.D, shape.Dv), rows = shape.B * shape.H * CeilDiv(shape.S, 64);
  const bool has_schedule = !mask.parts.fixed.empty() && mask.parts.dynamic.empty();
  if (!has_schedule || shape.dtype == DType::kF32 || size > 128) return 0;
  const int64_t splits_of_row = CeilDiv(shape.T, 64) / kFewestTilesOfSplit;
  if (splits_of_row < 2) return 0;
  const int64_t splits =
      rows < kMostScheduleSplits ? std::min(rows * splits_of_row, kMostScheduleSplits) : kMostScheduleSplits;
  return splits * SplitBytes(size <= 64 ? 64 : 128);
}

}  // namespace

int64_t BoundSm90Workspace(const AttentionArgs& args, const AttentionMask& mask) {
  const bool has_mask = !mask.parts.fixed.empty() || !mask.parts.dynamic.empty();
  return std::max({BoundSplitBytes(args, mask), BoundChoosingBytes(args, has_mask), BoundInt8Workspace(args)});
}

}  // namespace cuda
}  // namespace stof
