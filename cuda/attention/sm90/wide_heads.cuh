// SPDX-License-Identifier: Apache-2.0
// Kernels for heads of more than 128 elements: one tile for each size. A full bias would need more registers than there
// are.
#ifndef STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
#define STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_

#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// kRow, kFull, kPartial: nanoseconds, as RowNs, FullNs and PartialNs.
template <typename Head_, typename Tile_, int64_t kRow, int64_t kFull, int64_t kPartial, bool kSkipsByScore = false>
struct WideHeads {
  template <typename T, ScoreMod kScoreMod>
  static constexpr KernelEntry kKernels[] = {
      MakeKernel<T, Head_, Tile_, Stages<2>, QueryStages<1>, Pipelines<1>, Splits<1>, kScoreMod, false, false,
                 kSkipsByScore>(RowNs{kRow}, FullNs{kFull}, PartialNs{kPartial}),
  };
  static KernelTable Find(const KernelProblem& problem) {
    const bool bf16 = problem.dtype == DType::kBF16;
    switch (problem.score_mod()) {
      case ScoreMod::kFullBias:
        return KernelTable();
      case ScoreMod::kRelativeBias:
        return bf16 ? kKernels<__nv_bfloat16, ScoreMod::kRelativeBias> : kKernels<__half, ScoreMod::kRelativeBias>;
      default:
        return bf16 ? kKernels<__nv_bfloat16, ScoreMod::kNone> : kKernels<__half, ScoreMod::kNone>;
    }
  }
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
