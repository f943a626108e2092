// SPDX-License-Identifier: Apache-2.0
// Between the backend and the kernels that take a row of the mask at a time.
#ifndef STOF_CUDA_ATTENTION_ROWWISE_API_H_
#define STOF_CUDA_ATTENTION_ROWWISE_API_H_

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

constexpr int kRowwiseTile = 64;  // m and n of their block mask

// By the larger of D and Dv, which are multiples of 16 bytes, as are all strides and addresses; nullptr: no such
// kernel. extras: softcap or a bias.
Launch FindRowwise(DType dtype, int head_size, bool score_mod);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_ROWWISE_API_H_
