// SPDX-License-Identifier: Apache-2.0
// The attention kernels' second output, for those who ask for it: the logarithm of each row's divisor.
#ifndef STOF_CUDA_ATTENTION_LSE_CUH_
#define STOF_CUDA_ATTENTION_LSE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Called by one thread a row, before rows without a key get anything in its place. total: the sum of the row's weights
// in units of 2^high, the sink's among them; 0: no key is allowed.
template <typename T>
__device__ __forceinline__ void StoreLse(const AttentionParams& p, int b, int h, int row, float high, float total) {
  if (p.lse == nullptr || row >= p.S) return;
  constexpr float kLn2 = 0.693147180559945309417f;
  float sum = total == 0.0f ? -INFINITY : (high + log2f(total)) * kLn2;
  if (p.sink != nullptr) {
    float sink = 0.0f;
    if (sizeof(T) == 4 || p.sink_is_float != 0) {
      sink = static_cast<const float*>(p.sink)[h];
    } else if constexpr (sizeof(T) == 2) {
      sink = ToFloat(static_cast<const T*>(p.sink)[h]);
    }
    // A sink far above all scores is in the sum as 2^127 alone. NaN stays.
    if (sum < sink) sum = sink;
  }
  p.lse[b * p.lse_stride_b + h * p.lse_stride_h + row] = sum;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_LSE_CUH_
