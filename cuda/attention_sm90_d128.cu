// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<128, 128, 160, 2, 1, 1>, T>(3540, 2015, 2040),
    sm90::Describe<sm90::Shape<128, 128, 128, 2, 2, 1>, T>(2770, 1582, 1608),
    sm90::Describe<sm90::Shape<128, 192, 64, 4, 1, 1>, T>(3914, 1246, 1246),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2, 2>, T>(2529, 1046, 1073),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2>, T>(2295, 1113, 1159, 245),
    sm90::Describe<sm90::Shape<128, 128, 64, 4, 2, 1>, T>(2133, 989, 1004),
    {},
};

// For softcap, biases and scales that are not positive.
template <typename T>
constexpr Sm90Kernel kWithExtras[] = {
    sm90::Describe<sm90::Shape<128, 192, 64, 2, 1, 1, 1, Extras::kPairs>, T>(3967, 1555, 1655),
    {},
};

const Sm90Kernel* FindSm90D128(bool bf16, Extras extras) {
  if (extras != Extras::kNone) return bf16 ? kWithExtras<__nv_bfloat16> : kWithExtras<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
