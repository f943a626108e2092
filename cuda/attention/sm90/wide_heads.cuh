// SPDX-License-Identifier: Apache-2.0
// Heads of more than 128 elements: one tile a size, which has no registers for biases of pairs.
#ifndef STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
#define STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// kKeys: of a tile of 128 rows; the costs are those of Describe.
template <int kHead, int kKeys, int kRowCost, int kFullCost, int kPartialCost>
struct Wide {
  template <typename T, Extras kExtras>
  static constexpr Sm90Kernel kKernels[] = {
      Describe<Shape<kHead, 128, kKeys, 2, 1, 1, 1, kExtras>, T>(kRowCost, kFullCost, kPartialCost),
      {},
  };
  static const Sm90Kernel* Find(bool bf16, Extras extras) {
    static constexpr Sm90Kernel kNone;
    if (extras == Extras::kPairs) return &kNone;
    if (extras == Extras::kDistances) {
      return bf16 ? kKernels<__nv_bfloat16, Extras::kDistances> : kKernels<__half, Extras::kDistances>;
    }
    return bf16 ? kKernels<__nv_bfloat16, Extras::kNone> : kKernels<__half, Extras::kNone>;
  }
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_WIDE_HEADS_CUH_
