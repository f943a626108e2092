// SPDX-License-Identifier: Apache-2.0
// Kernels for heads of more than 128 elements: one tile for each size. A full bias would need more registers than there
// are.
#ifndef STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
#define STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_

#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// kKeys: keys of a tile of 128 query rows. The costs are nanoseconds, as for MakeKernel.
template <int kHead, int kKeys, int kRowCost, int kFullCost, int kPartialCost>
struct WideHeads {
  template <typename T, ScoreMod kScoreMod>
  static constexpr Sm90Kernel kKernels[] = {
      MakeKernel<Sm90Shape<kHead, 128, kKeys, 2, 1, 1, 1, kScoreMod>, T>(kRowCost, kFullCost, kPartialCost),
      {},
  };
  static const Sm90Kernel* Find(bool bf16, ScoreMod score_mod) {
    static constexpr Sm90Kernel kNone;
    if (score_mod == ScoreMod::kFullBias) return &kNone;
    if (score_mod == ScoreMod::kRelativeBias) {
      return bf16 ? kKernels<__nv_bfloat16, ScoreMod::kRelativeBias> : kKernels<__half, ScoreMod::kRelativeBias>;
    }
    return bf16 ? kKernels<__nv_bfloat16, ScoreMod::kNone> : kKernels<__half, ScoreMod::kNone>;
  }
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
