// SPDX-License-Identifier: Apache-2.0
// Cost model of the row-wise kernel and of the tiled kernels that it competes with. Plain C++.
#ifndef STOF_CUDA_ATTENTION_ROWWISE_COST_H_
#define STOF_CUDA_ATTENTION_ROWWISE_COST_H_

#include <cstdint>

#include "plugins/core/mask/block_mask.h"

namespace stof {
namespace cuda {

// Counts over all batches and heads.
struct MaskCounts {
  int64_t tiles = 0;      // full and partial ones
  int64_t pairs = 0;      // allowed pairs of a query and a key
  int64_t most_keys = 0;  // of one query
};
MaskCounts CountPairs(const BlockMask& mask, int64_t B, int64_t H);

// Nanoseconds that the row-wise kernel takes, by a model measured on an H100 (docs/design/attention-cuda.md). counts:
// of tiles with kRowwiseTile rows; rows: of all batches and heads; head_bytes: of one key.
double PredictRowwise(const MaskCounts& counts, int64_t rows, int head_bytes, int sm_count);
// The same for the sm_80 kernel, or the fp32 kernel. counts: of their tiles, all of which count as partial.
double PredictTiled(const MaskCounts& counts, int head_bytes, bool fp32, int sm_count);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_ROWWISE_COST_H_
