// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<64, 256, 64, 6, 2, 1>, T>(1944, 811, 1098),
    sm90::Describe<sm90::Shape<64, 128, 64, 4, 2, 2, 1, Extras::kNone, true>, T>(3124, 825, 1063),
    sm90::Describe<sm90::Shape<64, 128, 128, 4, 2, 1>, T>(1872, 983, 1104, 130),
    sm90::Describe<sm90::Shape<64, 64, 64, 2, 1, 4, 4>, T>(1453, 1241, 1470, 124),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 2, 2>, T>(1319, 1149, 1530, 96, 200),
    sm90::Describe<sm90::Shape<64, 64, 64, 2, 2, 4>, T>(2677, 1197, 1197, 111, 393),
    sm90::Describe<sm90::Shape<64, 192, 64, 6, 2, 1>, T>(1978, 741, 806, 46),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 1, 2, 2>, T>(1201, 1202, 1306, 238),
    sm90::Describe<sm90::Shape<64, 192, 128, 3, 2, 1>, T>(1782, 1298, 1298, 180),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 1, 3>, T>(3955, 1713, 1861, 33, 286),
    {},
};

// For softcap, biases by distance and scales that are not positive.
template <typename T>
constexpr Sm90Kernel kDistances[] = {
    sm90::Describe<sm90::Shape<64, 192, 64, 6, 2, 1, 1, Extras::kDistances>, T>(2600, 1207, 1495),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 1, 2, 2, Extras::kDistances>, T>(2240, 1680, 2100),
    {},
};

// For these and biases of pairs.
template <typename T>
constexpr Sm90Kernel kPairs[] = {
    sm90::Describe<sm90::Shape<64, 192, 64, 3, 1, 1, 1, Extras::kPairs>, T>(2600, 1540, 1740),
    sm90::Describe<sm90::Shape<64, 64, 64, 2, 1, 2, 2, Extras::kPairs>, T>(1400, 1210, 1410),
    {},
};

const Sm90Kernel* FindSm90D64(bool bf16, Extras extras) {
  if (extras == Extras::kPairs) return bf16 ? kPairs<__nv_bfloat16> : kPairs<__half>;
  if (extras == Extras::kDistances) return bf16 ? kDistances<__nv_bfloat16> : kDistances<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
