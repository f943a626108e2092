// SPDX-License-Identifier: Apache-2.0
// Attention in fp32 for one instruction set.
#include "cpu/attention/entry_points.h"
#include "cpu/kernel_table.h"

namespace stof {
namespace cpu {

STOF_EXPORT_KERNELS(AttentionKernels, attention) = kAttentionKernels;

}  // namespace cpu
}  // namespace stof
