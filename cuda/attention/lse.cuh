// SPDX-License-Identifier: Apache-2.0
// The optional second output of the attention kernels: the log-sum-exp (LSE) of each row.
#ifndef STOF_CUDA_ATTENTION_LSE_CUH_
#define STOF_CUDA_ATTENTION_LSE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Stores the LSE of a row; called by one thread a row, before fully masked rows are filled in. total: the row sum in
// units of 2^row_max, with the sink; 0: the row is fully masked.
template <typename T>
__device__ __forceinline__ void StoreLse(const AttentionParams& p, int b, int h, int row, float row_max, float total) {
  if (p.lse == nullptr || row >= p.S) return;
  constexpr float kLn2 = 0.693147180559945309417f;
  float sum = total == 0.0f ? -INFINITY : (row_max + log2f(total)) * kLn2;
  if (p.sink != nullptr) {
    float sink = 0.0f;
    if (sizeof(T) == 4 || p.sink_is_float != 0) {
      sink = static_cast<const float*>(p.sink)[h];
    } else if constexpr (sizeof(T) == 2) {
      sink = ToFloat(static_cast<const T*>(p.sink)[h]);
    }
    // A sink far above all scores is capped at 2^127 in the sum. NaN stays.
    if (sum < sink) sum = sink;
  }
  p.lse[b * p.lse_stride_b + h * p.lse_stride_h + row] = sum;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_LSE_CUH_
