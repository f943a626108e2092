// SPDX-License-Identifier: Apache-2.0
// Where the workers of a kernel count the rows that they draw at run time.
#ifndef STOF_CUDA_DRAW_COUNTS_H_
#define STOF_CUDA_DRAW_COUNTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "plugins/core/op.h"
#include "plugins/core/status.h"

namespace stof {
namespace cuda {

// A count in memory of the current device that is 0 whenever no kernel uses it: each kernel leaves it so. Kernels of
// one stream follow each other and share one. A captured launch gets one of its own, for its graph may run on any
// stream: the keeper holds it, and where there is none it stays for ever.
Status DrawCount(cudaStream_t stream, Keeper* keeper, int32_t** count);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_DRAW_COUNTS_H_
