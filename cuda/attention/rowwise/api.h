// SPDX-License-Identifier: Apache-2.0
// The family of row-wise kernels, for sparse masks of scattered keys.
#ifndef STOF_CUDA_ATTENTION_ROWWISE_API_H_
#define STOF_CUDA_ATTENTION_ROWWISE_API_H_

#include "cuda/attention/kernel_table.h"

namespace stof {
namespace cuda {

constexpr int kRowwiseTile = 64;  // m and n of their block mask

using RowwiseCode = LaunchCode<AttentionParams>;

// D, Dv, strides and addresses are multiples of 16 bytes.
extern const KernelFamily kRowwiseFamily;

KernelTable FindRowwise(const KernelProblem& problem);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_ROWWISE_API_H_
