// SPDX-License-Identifier: Apache-2.0
// The workspace of the sm80 kernels: tables of relative positions, or 8-bit operands.
#include <algorithm>
#include <iterator>

#include "cuda/attention/int8/precision.h"
#include "cuda/attention/relative/layout.h"
#include "cuda/attention/sm80/head_sizes.h"
#include "cuda/attention/workspace_bounds.h"

namespace stof {
namespace cuda {

int64_t BoundSm80Workspace(const AttentionArgs& args, const AttentionMask&) {
  if (args.shape.dtype == DType::kF32) return 0;
  const auto* const head_size =
      std::lower_bound(std::begin(kSm80HeadSizes), std::end(kSm80HeadSizes) - 1, std::max(args.shape.D, args.shape.Dv));
  RelativeLayout layout;
  const int64_t relative = PlanRelative(args, *head_size, &layout).ok() ? layout.bytes : 0;
  return std::max(relative, BoundInt8Workspace(args));
}

}  // namespace cuda
}  // namespace stof
