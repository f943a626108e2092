// SPDX-License-Identifier: Apache-2.0
// Whether a packed batch is legal as a whole, found by each CTA for itself.
#ifndef STOF_CUDA_PAGED_ATTENTION_BATCH_CHECK_CUH_
#define STOF_CUDA_PAGED_ATTENTION_BATCH_CHECK_CUH_

#include <cuda_runtime.h>

#include "cuda/paged_attention/token_rows.h"

namespace stof {
namespace cuda {

// Whether cumulative[B + 1] begins at 0, rises, and does not exceed N. Otherwise no token has a sequence of its own.
// All threads of the CTA call it.
template <int kThreads>
__device__ bool IsLegalBatch(const PagedShape& shape, const int32_t* cumulative) {
  bool is_wrong = cumulative[0] != 0 || cumulative[shape.B] > shape.N;
  for (int64_t i = threadIdx.x; i < shape.B; i += kThreads) {
    is_wrong = is_wrong || cumulative[i + 1] < cumulative[i];
  }
  return __syncthreads_or(is_wrong ? 1 : 0) == 0;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PAGED_ATTENTION_BATCH_CHECK_CUH_
