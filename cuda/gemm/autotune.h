// SPDX-License-Identifier: Apache-2.0
// Times the candidates for a GEMM on this device: once for a shape, where a run may wait.
#ifndef STOF_CUDA_GEMM_AUTOTUNE_H_
#define STOF_CUDA_GEMM_AUTOTUNE_H_

#include <functional>

#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Queues candidate `index` on the context's stream; *done is false where that cannot be.
using QueueCandidate = std::function<Status(int index, const RunContext& context, bool* done)>;

// The fastest one, an earlier one where a later one is not 2 % faster. Each is run in a captured graph of several on a
// stream of its own, by turns with the others, after what the context's stream has queued. seconds: about what one
// takes. An error, or *best = -1, where nothing could be timed.
Status FindFastest(int count, const QueueCandidate& queue, const RunContext& context, double seconds, int* best);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_AUTOTUNE_H_
