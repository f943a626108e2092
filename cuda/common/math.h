// SPDX-License-Identifier: Apache-2.0
// Constants that the CUDA kernels share.
#ifndef STOF_CUDA_COMMON_MATH_H_
#define STOF_CUDA_COMMON_MATH_H_

namespace stof {
namespace cuda {

constexpr float kLog2E = 1.44269504088896340736f;  // log2(e): the kernels compute e^x as 2^(x log2 e)

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_MATH_H_
