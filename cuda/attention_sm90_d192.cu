// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<192, 128, 96, 2, 1, 1>, T>(3000, 1570, 1680),
    {},
};

template <typename T>
constexpr Sm90Kernel kWithExtras[] = {
    sm90::Describe<sm90::Shape<192, 128, 96, 2, 1, 1, 1, Extras::kDistances>, T>(3000, 1570, 1680),
    {},
};

const Sm90Kernel* FindSm90D192(bool bf16, Extras extras) {
  static constexpr Sm90Kernel kNone;
  if (extras == Extras::kPairs) return &kNone;
  if (extras == Extras::kDistances) return bf16 ? kWithExtras<__nv_bfloat16> : kWithExtras<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
