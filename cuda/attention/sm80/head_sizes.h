// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_ATTENTION_SM80_HEAD_SIZES_H_
#define STOF_CUDA_ATTENTION_SM80_HEAD_SIZES_H_

namespace stof {
namespace cuda {

// Head sizes that kernels are compiled for, in rising order.
constexpr int kSm80HeadSizes[] = {32, 64, 96, 128, 160, 192, 256};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_HEAD_SIZES_H_
