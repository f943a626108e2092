// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<128, 128, 160, 2, 1, 1>, T>(2200, 1990, 2420),
    sm90::Describe<sm90::Shape<128, 128, 128, 2, 2, 1>, T>(2200, 1655, 1900),
    sm90::Describe<sm90::Shape<128, 192, 64, 4, 2, 1>, T>(3000, 1206, 1453),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 1, 2, 2>, T>(2800, 900, 1100),
    sm90::Describe<sm90::Shape<128, 64, 64, 2, 2, 2>, T>(2200, 900, 1100),
    sm90::Describe<sm90::Shape<128, 128, 64, 4, 2, 1>, T>(2200, 900, 1100),
    {},
};

const Sm90Kernel* FindSm90D128(bool bf16) { return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>; }

}  // namespace cuda
}  // namespace stof
