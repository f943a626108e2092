// SPDX-License-Identifier: Apache-2.0
// The online softmax of the sm_90a kernels, with conditional rescaling of the output.
#ifndef STOF_CUDA_ATTENTION_SM90_SOFTMAX_CUH_
#define STOF_CUDA_ATTENTION_SM90_SOFTMAX_CUH_

#include "cuda/attention/far_scores.cuh"
#include "cuda/common/mma_sm90.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// The row max is that of the first tile, and raised only where a score exceeds it by S::kSlack. So the output is
// rescaled a few times a row (FlashAttention 4 has the same idea), and most tiles need no maximum.
// A row max farther from zero is not subtracted in the same step as the scale. Below -kNear, scores near zero would
// lose their last bits; above kNear, the rounding of the row max would show in the weights.
constexpr float kNear = 1024.0f;

// For one thread of a kernel of shape S: two rows of the scores of 64 queries and a tile's keys.
template <typename S>
class Softmax {
  static constexpr int kScores = S::kN / 2, kChains = 4;

 public:
  // Element i of a thread's scores: which of the two rows, and its position in that row.
  static __device__ __forceinline__ constexpr int RowOf(int i) { return i / 2 % 2; }
  static __device__ __forceinline__ constexpr int OrderOf(int i) { return i / 4 * 2 + i % 2; }

  // The eager weights, and the sums of all weights in several chains: too few other warps hide the latency of one
  // chain.
  struct EagerWeights {
    float weight[S::kEagerWeights > 0 ? S::kEagerWeights : 1];
    float sum[2][kChains];
  };
  static __device__ __forceinline__ void Add(int i, float weight, EagerWeights* eager) {
    float& sum = eager->sum[RowOf(i)][OrderOf(i) % kChains];
    sum = OrderOf(i) < kChains ? weight : sum + weight;
  }
  static __device__ __forceinline__ void FirstWork(const float (&s)[kScores], EagerWeights* eager) {
#pragma unroll
    for (int i = 0; i < S::kEagerWeights; ++i) {
      eager->weight[i] = Exp2(s[i]);
      if (i < S::kEagerSums) Add(i, eager->weight[i], eager);
    }
  }

  // Scores to logarithms of weights, if the row max stays.
  static __device__ __forceinline__ float SubtractedMax(float row_max) {
    return fabsf(row_max) <= kNear ? row_max : 0.0f;
  }
  static __device__ __forceinline__ void SubtractMax(float scale, const float (&base)[2], float (&s)[kScores],
                                                     EagerWeights* eager) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = s[i] * scale - base[RowOf(i)];
    FirstWork(s, eager);
  }

  // Whether the warp has to look for a new row max. Compared as integers, non-negative numbers keep their order and NaN
  // is above all. The sums of eager weights are compared instead of their logarithms: else ptxas puts all exponentials
  // behind the vote, and the special function unit idles.
  static __device__ __forceinline__ bool MustRaiseMax(const float (&row_max)[2], const float (&s)[kScores],
                                                      const EagerWeights& eager) {
    constexpr int kLanes = 8;
    int32_t most[kLanes];
#pragma unroll
    for (int i = S::kEagerSums; i < kScores; i += 2) {
      const int at = (i - S::kEagerSums) / 2, c = at % kLanes;
      const int32_t x = __float_as_int(s[i]), y = __float_as_int(s[i + 1]);
      most[c] = at < kLanes ? max(x, y) : __vimax3_s32(most[c], x, y);
    }
    const int32_t top = max(__vimax3_s32(__vimax3_s32(most[0], most[1], most[2]), most[3], most[4]),
                            __vimax3_s32(most[5], most[6], most[7]));
    int32_t sums = 0;
#pragma unroll
    for (int c = 0; c < (S::kEagerSums > 0 ? kChains : 0); ++c) {
      sums = __vimax3_s32(sums, __float_as_int(eager.sum[0][c]), __float_as_int(eager.sum[1][c]));
    }
    const bool known = fabsf(row_max[0]) <= kNear && fabsf(row_max[1]) <= kNear;
    return __any_sync(~0u, !known || top >= __float_as_int(S::kSlack) || sums >= __float_as_int(S::kMostWeight)) != 0;
  }

  // Raises the row max where a score exceeds it by S::kSlack. Scores are in units of log2 once multiplied by `scale`,
  // less `base`. Subtracts the new row max, sets the factors that rescale earlier sums and outputs, and computes the
  // eager weights again. kFirst: the first tile of a row, without earlier row max and sums; else scale is 1.
  template <bool kFirst>
  static __device__ __forceinline__ void RaiseMax(float scale, const float (&base)[2], float (&s)[kScores],
                                                  EagerWeights* eager, float (&row_max)[2], float (&factor)[2],
                                                  float (&sum)[2]) {
    float less[2];
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tops[kChains];
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float pair = fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
        tops[j % kChains] = j < kChains ? pair : fmaxf(tops[j % kChains], pair);
      }
      float top = tops[0];
#pragma unroll
      for (int c = 1; c < kChains; ++c) top = fmaxf(top, tops[c]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = __fmul_rn(fmaxf(top, __shfl_xor_sync(~0u, top, 2)), scale);
      if constexpr (kFirst) {
        if constexpr (S::kHeadroom != 0.0f) top -= S::kHeadroom;
        row_max[r] = top;
        less[r] = top == -INFINITY ? 0.0f : top;
        far |= fabsf(less[r]) > kFar;
      } else {
        const float old = row_max[r] - base[r], above = ScoreDifference(top, old);
        const bool raised = above > S::kSlack;
        // To a score that counts as equal, so that it becomes equal.
        const bool moved = raised || (S::kHeadroom == 0.0f && above == 0.0f);
        if constexpr (S::kHeadroom != 0.0f) top -= S::kHeadroom;
        row_max[r] = moved ? base[r] + top : row_max[r];
        // Near zero this is what the rounded sum of row_max stands for, so that all tiles subtract the same.
        const float now = fabsf(row_max[r]) <= kNear ? row_max[r] - base[r] : moved ? top : old;
        factor[r] = raised ? Exp2(old - now) : 1.0f;  // 0 from -inf
        less[r] = now == -INFINITY ? 0.0f : now;
        sum[r] *= factor[r];
      }
    }
    if (kFirst && __builtin_expect(__any_sync(~0u, far), 0)) {
      // One multiply-add would compare scores with the rounding of their maximum.
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = __fmul_rn(s[i], scale);
      scale = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = s[i] * scale - less[RowOf(i)];
    FirstWork(s, eager);
  }

  // The remaining weights, and all sums.
  static __device__ __forceinline__ void FinishWeights(EagerWeights* eager, float (&s)[kScores], float (&sum)[2]) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      s[i] = i < S::kEagerWeights ? eager->weight[i] : Exp2(s[i]);
      if (i >= S::kEagerSums) Add(i, s[i], eager);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = eager->sum[r][0];
#pragma unroll
      for (int c = 1; c < kChains; ++c) all += eager->sum[r][c];
      sum[r] += all;
    }
  }
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SOFTMAX_CUH_
