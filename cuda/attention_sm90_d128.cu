// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<128, 128, 128, 2, 2, 1, 1, Extras::kNone, true>, T>(2142, 1443, 1704, 12),
    sm90::Describe<sm90::Shape<128, 192, 64, 4, 1, 1, 1, Extras::kNone, true>, T>(5434, 916, 974),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2, 2>, T>(2263, 1043, 1043),
    sm90::Describe<sm90::Shape<128, 64, 64, 3, 1, 2>, T>(1771, 998, 1007, 35),
    sm90::Describe<sm90::Shape<128, 128, 64, 4, 2, 1, 1, Extras::kNone, true, true>, T>(1216, 882, 882),
    sm90::Describe<sm90::Shape<128, 64, 96, 2, 1, 2>, T>(2323, 1562, 1580, 0, 144),
    sm90::Describe<sm90::Shape<128, 128, 96, 3, 1, 1>, T>(2292, 1174, 1385),
    {},
};

// For softcap, biases by distance and scales that are not positive.
template <typename T>
constexpr Sm90Kernel kDistances[] = {
    sm90::Describe<sm90::Shape<128, 128, 128, 2, 2, 1, 1, Extras::kDistances>, T>(2200, 1850, 1950),
    sm90::Describe<sm90::Shape<128, 192, 64, 4, 1, 1, 1, Extras::kDistances>, T>(3967, 1560, 1660),
    {},
};

// For these and biases of pairs.
template <typename T>
constexpr Sm90Kernel kPairs[] = {
    sm90::Describe<sm90::Shape<128, 128, 64, 2, 1, 1, 1, Extras::kPairs>, T>(2057, 1480, 1580),
    {},
};

const Sm90Kernel* FindSm90D128(bool bf16, Extras extras) {
  if (extras == Extras::kPairs) return bf16 ? kPairs<__nv_bfloat16> : kPairs<__half>;
  if (extras == Extras::kDistances) return bf16 ? kDistances<__nv_bfloat16> : kDistances<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
