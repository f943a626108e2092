// SPDX-License-Identifier: Apache-2.0
// What the row-wise kernel needs of a mask beside what kernels with tiles do. Plain C++.
#ifndef STOF_CUDA_SCHEDULE_ROWWISE_COST_H_
#define STOF_CUDA_SCHEDULE_ROWWISE_COST_H_

#include <cstdint>

#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// Over all batches and heads: tiles that are kept, pairs of a query and a key in them; and the most keys of a query.
struct MaskCounts {
  int64_t tiles = 0, pairs = 0, longest = 0;
};
MaskCounts CountPairs(const BlockMask& mask, int64_t B, int64_t H);

// Nanoseconds by the model, measured on an H100 (docs/design/attention-cuda.md). The row-wise kernel, from the counts
// of tiles of kRowsTile rows; `rows` of all batches and heads; head_bytes: of a key.
double PredictRows(const MaskCounts& counts, int64_t rows, int head_bytes, int multiprocessors);
// The kernels for capability 8.0 and for fp32, from the counts of their tiles, all of which are taken to be partial.
double PredictSm80(const MaskCounts& counts, int head_bytes, bool fp32, int multiprocessors);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SCHEDULE_ROWWISE_COST_H_
