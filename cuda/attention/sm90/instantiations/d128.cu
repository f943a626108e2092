// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::MakeKernel<sm90::Shape<128, 128, 128, 2, 2, 1, 1, ScoreMod::kNone, true>, T>(2184, 1373, 1510, 33),
    sm90::MakeKernel<sm90::Shape<128, 192, 64, 4, 1, 1, 1, ScoreMod::kNone, true>, T>(3912, 941, 1117),
    sm90::MakeKernel<sm90::Shape<128, 64, 64, 2, 1, 2, 2>, T>(2113, 1030, 1040),
    sm90::MakeKernel<sm90::Shape<128, 64, 64, 3, 1, 2>, T>(1577, 986, 1006, 99),
    sm90::MakeKernel<sm90::Shape<128, 128, 64, 4, 2, 1, 1, ScoreMod::kNone, true, true>, T>(1010, 845, 872, 18),
    sm90::MakeKernel<sm90::Shape<128, 64, 96, 2, 1, 2>, T>(1615, 1464, 1478, 405),
    sm90::MakeKernel<sm90::Shape<128, 128, 96, 3, 1, 1>, T>(2252, 1163, 1273, 33),
    {},
};

// For softcap, biases by distance and scales that are not positive.
template <typename T>
constexpr Sm90Kernel kRelativeBias[] = {
    sm90::MakeKernel<sm90::Shape<128, 128, 128, 2, 2, 1, 1, ScoreMod::kRelativeBias>, T>(2200, 1850, 1950),
    sm90::MakeKernel<sm90::Shape<128, 192, 64, 4, 1, 1, 1, ScoreMod::kRelativeBias>, T>(3967, 1560, 1660),
    {},
};

// For these and biases of pairs.
template <typename T>
constexpr Sm90Kernel kFullBias[] = {
    sm90::MakeKernel<sm90::Shape<128, 128, 64, 2, 1, 1, 1, ScoreMod::kFullBias>, T>(2057, 1480, 1580),
    {},
};

const Sm90Kernel* FindSm90D128(bool bf16, ScoreMod score_mod) {
  if (score_mod == ScoreMod::kFullBias) return bf16 ? kFullBias<__nv_bfloat16> : kFullBias<__half>;
  if (score_mod == ScoreMod::kRelativeBias) return bf16 ? kRelativeBias<__nv_bfloat16> : kRelativeBias<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
