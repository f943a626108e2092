// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention_sm90.cuh"

namespace stof {
namespace cuda {

template <typename T>
constexpr Sm90Kernel kKernels[] = {
    {256, 64, 1, {2750, 977, 1307}, sm90::Launch<sm90::Shape<64, 256, 64, 6, 2, 1>, T>},
    {128, 64, 2, {2840, 1082, 1350}, sm90::Launch<sm90::Shape<64, 128, 64, 4, 2, 2>, T>},
    {128, 128, 1, {1400, 1200, 1630}, sm90::Launch<sm90::Shape<64, 128, 128, 4, 2, 1>, T>},
    {},
};

const Sm90Kernel* FindSm90D64(bool bf16) { return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>; }

}  // namespace cuda
}  // namespace stof
