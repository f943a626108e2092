// SPDX-License-Identifier: Apache-2.0
// The row-wise attention kernels, for sparse masks of scattered keys.
#ifndef STOF_CUDA_ATTENTION_ROWWISE_API_H_
#define STOF_CUDA_ATTENTION_ROWWISE_API_H_

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

constexpr int kRowwiseTile = 64;  // m and n of their block mask

// The kernel for the larger of D and Dv; nullptr: there is none. D, Dv, strides and addresses are multiples of 16
// bytes. score_mod: with softcap or a bias.
Launch FindRowwise(DType dtype, int head_size, bool score_mod);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_ROWWISE_API_H_
