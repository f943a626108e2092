// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_BLOCK_MASK_BUILDER_H_
#define STOF_PLUGINS_CORE_BLOCK_MASK_BUILDER_H_

#include "plugins/core/block_mask.h"
#include "plugins/core/expr.h"
#include "plugins/core/status.h"

namespace stof {

// The block mask of an expression without run-time operands, for tiles of m query rows × n keys (n a multiple of 32, at
// most 1024; m at most 1024). Time follows the number of tiles that are neither empty nor full, never S×T.
Status BuildBlockMask(const MaskExpr& expr, const ExprSizes& sizes, int m, int n, BlockMask* mask);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BLOCK_MASK_BUILDER_H_
