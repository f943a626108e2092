// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/workspace.h"

#include <algorithm>
#include <iterator>

#include "cuda/attention/relative/layout.h"
#include "cuda/attention/workspace_bounds.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

int64_t BoundFp32Workspace(const AttentionArgs& args, const AttentionMask&) {
  const AttentionShape& shape = args.shape;
  if (shape.dtype != DType::kF32) return 0;
  const auto* const head_size =
      std::lower_bound(std::begin(kFp32HeadSizes), std::end(kFp32HeadSizes) - 1, std::max(shape.D, shape.Dv));
  RelativeLayout relative;
  if (!PlanRelative(args, *head_size, &relative).ok()) relative = RelativeLayout();
  const Fp32Workspace split(shape.B * shape.G * CeilDiv(shape.T, kTileKeys), kFp32MostPlanes, *head_size);
  return relative.bytes == 0 ? split.bytes : RoundUp(split.bytes, kRelativeAlign) + relative.bytes;
}

}  // namespace cuda
}  // namespace stof
