// SPDX-License-Identifier: Apache-2.0
// Attention with matmuls in bf16 and fp32 sums, for an instruction set that has them (AttentionArgs::allow_bf16).
#define STOF_BF16_MATMULS
#include "cpu/attention/entry_points.h"
#include "cpu/kernel_table.h"

namespace stof {
namespace cpu {

STOF_EXPORT_KERNELS(AttentionKernels, attention_bf16) = kAttentionKernels;

}  // namespace cpu
}  // namespace stof
