// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_MASK_BLOCK_MASK_BUILDER_H_
#define STOF_PLUGINS_CORE_MASK_BLOCK_MASK_BUILDER_H_

#include "plugins/core/base/status.h"
#include "plugins/core/mask/block_mask.h"
#include "plugins/core/mask/expr.h"

namespace stof {

// Limits of a block mask, in memory and in time.
struct BlockMaskBounds {
  int64_t bytes = int64_t{128} << 20;          // of the finished mask
  int64_t element_bytes = int64_t{128} << 20;  // of those, the element masks with what finds equal ones
  int64_t operations = int64_t{1} << 34;       // about a nanosecond each, on one thread
  // Where element masks or operations exceed their bounds, the remaining partial tiles stay without bits. Otherwise the
  // build fails. It always fails where the tile lists alone exceed `bytes`.
  bool leaves_tiles = false;
};

// For kernels that evaluate tiles themselves (StaticMask::elements). As much as BlockMaskCache holds.
constexpr BlockMaskBounds kCpuBlockMaskBounds = {int64_t{64} << 20, int64_t{40} << 20, int64_t{1} << 34, true};

// The block mask of an expression without run-time operands, for tiles of m query rows × n keys (n a multiple of 32, at
// most 1024; m at most 1024). Time follows the number of tiles that are neither empty nor full, never S×T. A mask
// beyond the bounds is Status::TooLarge, with the size that it would have.
Status BuildBlockMask(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask,
                      const BlockMaskBounds& bounds = {});

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_BLOCK_MASK_BUILDER_H_
