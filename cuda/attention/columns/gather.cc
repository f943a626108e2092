// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/columns/gather.h"

#include <cuda_runtime.h>

#include "cuda/attention/decode/api.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {

bool ChooseGathered(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                    GatheredAttention* gathered) {
  if (mask.columns == nullptr || pad != nullptr || mask.parts.pad || !mask.parts.dynamic.empty() ||
      args.shape.S <= kDecodeQueries || args.shape.T == 0 || args.shape.B == 0 || args.scores.bias.data != nullptr ||
      args.scores.relative_bias.table != nullptr || args.scores.has_relative_tables() ||
      args.mask.empty_rows > EmptyRows::kNan || args.kernel[0] != '\0') {
    return false;
  }
  gathered->columns = mask.columns->Get(args.shape.H, args.shape.G, args.shape.T, args.shape.T);
  if (gathered->columns->mask == nullptr) return false;
  const KeyColumns& columns = *gathered->columns->columns;
  // Gathering saves pairs of queries and keys, and costs a copy of keys and values: as long as about 600 queries take
  // at the rate of the tensor cores (500 TFLOP/s, 3.5 TB/s in fp16).
  constexpr int64_t kQueriesOfCopy = 600;
  const double saved =
      static_cast<double>(columns.tile_keys() - columns.total()) / static_cast<double>(columns.lists());
  const double copied =
      static_cast<double>(args.shape.T) * static_cast<double>(args.shape.G) / static_cast<double>(args.shape.H);
  if (saved * static_cast<double>(args.shape.S) < static_cast<double>(kQueriesOfCopy) * copied) return false;
  gathered->args = args;
  gathered->sizes = sizes;
  const int64_t rows = columns.packed() + args.shape.T;
  if (rows > MaskExpr::kMaxSize) return false;
  gathered->args.shape.T = gathered->sizes.T = rows;
  // The same SkipDistance: copies are no further keys.
  gathered->args.scores.skip_threshold *= static_cast<float>(rows) / static_cast<float>(args.shape.T);
  gathered->args.scores.block_threshold = 0.0f;  // blocks are of neighbours
  // key_ends does not count the gathered columns in front of the keys, so 8-bit kernels would drop the last keys.
  if (args.kv.key_ends != nullptr) {
    gathered->args.kv.key_ends = nullptr;
    gathered->args.precision = AttentionPrecision::kFull;
  }
  gathered->args.key.stride = {args.shape.G * rows * args.shape.D, rows * args.shape.D, args.shape.D};
  gathered->args.value.stride = {args.shape.G * rows * args.shape.Dv, rows * args.shape.Dv, args.shape.Dv};
  gathered->args.key.data = gathered->args.value.data = nullptr;
  return true;
}

Status GatherColumns(const AttentionArgs& args, const DeviceColumns& columns, const RunContext& context,
                     GatheredAttention* gathered) {
  const int64_t item = SizeOf(args.shape.dtype);
  GatherParams p;
  p.from[0] = args.key.data, p.from[1] = args.value.data;
  p.rows = gathered->args.shape.T;
  p.keys = static_cast<int32_t>(args.shape.T), p.packed = static_cast<int32_t>(p.rows - args.shape.T);
  p.B = static_cast<int32_t>(args.shape.B), p.G = static_cast<int32_t>(args.shape.G);
  p.columns = columns;
  // The widest unit that all rows are made of.
  const int64_t sizes[2] = {args.shape.D, args.shape.Dv};
  const Strides strides[2] = {args.key.stride, args.value.stride};
  const auto fits = [&](int64_t unit) {
    for (int i = 0; i < 2; ++i) {
      const Strides& stride = strides[i];
      for (const int64_t elements : {sizes[i], stride.b, stride.h, stride.s}) {
        if (elements * item % unit != 0) return false;
      }
      if (reinterpret_cast<uintptr_t>(p.from[i]) % static_cast<uintptr_t>(unit) != 0) return false;
    }
    return true;
  };
  p.unit = fits(16) ? 16 : static_cast<int32_t>(item);
  const int64_t elements = p.unit / item;
  for (int i = 0; i < 2; ++i) {
    p.stride[i] = {strides[i].b / elements, strides[i].h / elements, strides[i].s / elements};
    p.row[i] = sizes[i] / elements;
    const auto bytes = static_cast<size_t>(args.shape.B * args.shape.G * p.rows * sizes[i] * item);
    p.to[i] = context.allocate(context.self, bytes);
    if (p.to[i] == nullptr) return Status();  // a workspace of fixed size may be too small
  }
  gathered->args.key.data = p.to[0], gathered->args.value.data = p.to[1];
  return ToStatus(static_cast<cudaError_t>(LaunchGather(p, context.stream)),
                  "launch of the kernel that gathers columns");
}

}  // namespace cuda
}  // namespace stof
