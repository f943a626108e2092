// SPDX-License-Identifier: Apache-2.0
// The mask of attention over a KV cache. Its queries begin at a position of each sequence that only a run knows. On the
// CPU BoundDynamicMask::MakeForCache binds it.
#ifndef STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_
#define STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_

#include <cstdint>
#include <memory>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {

// The name by which a device mask reads the first positions, [B]: the operand of that role of StofAttention.
constexpr char kFirstPositions[] = "lengths";

struct CachedMask {
  // In absolute positions, with P of each sequence; it implies k <= q.
  MaskExpr expr;
  // The same with q counted from 0 and P read from the operand kFirstPositions, for kernels that have it on a device.
  std::shared_ptr<const AttentionMask> on_device;
  // Where the mask is `k <= q` and at most a window to the left: how far that reaches, -1 without one.
  bool is_range = false;
  int64_t window_left = -1;
};

// Parses a mask and adds `k <= q` where no conjunct says it. An error where it reads T, whose value differs by
// sequence, or a run-time operand.
Status MakeCachedMask(const std::string& text, const Tables& tables, CachedMask* mask);

// Whether an expression is one of distances q - k alone: no other use of positions.
bool IsOfDistances(const MaskExpr& expr);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_
