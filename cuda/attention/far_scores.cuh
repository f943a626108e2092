// SPDX-License-Identifier: Apache-2.0
// Differences of scores that are far from zero, in units of log2.
#ifndef STOF_CUDA_ATTENTION_FAR_SCORES_CUH_
#define STOF_CUDA_ATTENTION_FAR_SCORES_CUH_

#include <cuda_runtime.h>

namespace stof {
namespace cuda {

// From here on the last bits of a score are worth more than the last bits of a weight.
constexpr float kFar = 0x1p16f;

// score - reference, of numbers that come in one piece or as the rounded sum of a row max and what exceeds it: equal
// scores may differ by two units in the last place, which far from zero would make one weight vanish beside the other.
// They count as equal there.
__device__ __forceinline__ float ScoreDifference(float score, float reference) {
  const float difference = score - reference;
  const float size = fabsf(reference);
  return size > kFar && fabsf(difference) < 0x1.8p-22f * size ? 0.0f : difference;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FAR_SCORES_CUH_
