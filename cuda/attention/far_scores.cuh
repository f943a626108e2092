// SPDX-License-Identifier: Apache-2.0
// Differences of scores with a large magnitude, in units of log2.
#ifndef STOF_CUDA_ATTENTION_FAR_SCORES_CUH_
#define STOF_CUDA_ATTENTION_FAR_SCORES_CUH_

#include <cuda_runtime.h>

namespace stof {
namespace cuda {

// Beyond this magnitude the last bits of a score are worth more than those of a weight.
constexpr float kFar = 0x1p16f;

// score - row_max. Either may be the rounded sum of an earlier row max and what exceeds it, so that equal scores differ
// by up to two units in the last place. Far from zero that would make one weight vanish beside the other: such scores
// count as equal.
__device__ __forceinline__ float ScoreDifference(float score, float row_max) {
  const float difference = score - row_max;
  const float size = fabsf(row_max);
  return size > kFar && fabsf(difference) < 0x1.8p-22f * size ? 0.0f : difference;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FAR_SCORES_CUH_
