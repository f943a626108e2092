// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/int8/precision.h"

#include <algorithm>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/int8/layout.h"

namespace stof {
namespace cuda {

// optimizer/stof/attention_precision/eight_bit_kernels.py mirrors it, to write the attribute where it counts.
AttentionPrecision Int8PrecisionOf(const AttentionArgs& args) {
  const AttentionShape& shape = args.shape;
  const ScoreArgs& scores = args.scores;
  const bool is_16_bit = shape.dtype == DType::kF16 || shape.dtype == DType::kBF16;
  // Decode kernels compute few queries.
  const bool fits = is_16_bit && shape.S > kDecodeQueries && !IsQuantized(shape.kv_dtype) && shape.D == shape.Dv &&
                    (shape.D == 64 || shape.D == 128) && shape.T > 0 && scores.scale > 0.0f && scores.softcap == 0.0f &&
                    scores.bias.data == nullptr && scores.relative_bias.table == nullptr &&
                    !scores.has_relative_tables() && scores.skip_threshold == 0.0f && scores.block_threshold == 0.0f;
  return fits ? args.precision : AttentionPrecision::kFull;
}

// Head sizes are bounds, too: a run may have the largest size of the kernels below them.
int64_t BoundInt8Workspace(const AttentionArgs& args) {
  AttentionArgs largest = args;
  largest.shape.D = largest.shape.Dv = std::min(args.shape.D, args.shape.Dv) < 128 ? 64 : 128;
  if (std::min(args.shape.D, args.shape.Dv) < 64) return 0;
  const AttentionPrecision precision = Int8PrecisionOf(largest);
  if (precision == AttentionPrecision::kFull) return 0;
  return Int8Layout(largest.shape, precision == AttentionPrecision::kInt8Fp8).total;
}

}  // namespace cuda
}  // namespace stof
