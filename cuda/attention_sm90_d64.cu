// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    sm90::Describe<sm90::Shape<64, 256, 64, 6, 2, 1>, T>(2750, 977, 1307),
    sm90::Describe<sm90::Shape<64, 128, 64, 4, 2, 2>, T>(2840, 1082, 1350),
    sm90::Describe<sm90::Shape<64, 128, 128, 4, 2, 1>, T>(1400, 1200, 1630),
    sm90::Describe<sm90::Shape<64, 64, 64, 2, 1, 4, 4>, T>(2800, 1100, 1300),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 2, 2>, T>(2800, 1100, 1300),
    sm90::Describe<sm90::Shape<64, 64, 64, 2, 2, 4>, T>(2800, 1100, 1300),
    sm90::Describe<sm90::Shape<64, 192, 64, 6, 2, 1>, T>(2800, 800, 1000),
    sm90::Describe<sm90::Shape<64, 64, 128, 2, 1, 2, 2>, T>(2800, 1100, 1300),
    sm90::Describe<sm90::Shape<64, 192, 128, 3, 2, 1>, T>(2800, 1500, 1800),
    {},
};

const Sm90Kernel* FindSm90D64(bool bf16) { return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>; }

}  // namespace cuda
}  // namespace stof
