// SPDX-License-Identifier: Apache-2.0
// Which kernels attention takes where operands of its matmuls may be rounded to bf16.
#ifndef STOF_CPU_ATTENTION_BF16_KERNELS_H_
#define STOF_CPU_ATTENTION_BF16_KERNELS_H_

#include "cpu/attention/attention.h"
#include "plugins/core/contract/bf16_kernels.h"

namespace stof {
namespace cpu {

// The kernels for a call; nullptr where it does not allow bf16, or where there are none.
const AttentionKernels* Bf16KernelsOf(const AttentionArgs& args, const CpuAttentionConfig& config);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_BF16_KERNELS_H_
