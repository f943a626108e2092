// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<128, 128, 160, 2, 1, 1>, T>(2200, 1990, 2100),
    sm90::Describe<sm90::Shape<128, 128, 128, 2, 2, 1>, T>(2200, 1655, 1750),
    sm90::Describe<sm90::Shape<128, 192, 64, 4, 1, 1>, T>(3967, 1206, 1300),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2, 2>, T>(2760, 1000, 1023),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2>, T>(3467, 1000, 1023),
    sm90::Describe<sm90::Shape<128, 128, 64, 4, 2, 1>, T>(2057, 957, 1043),
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
