// SPDX-License-Identifier: Apache-2.0
// Which kernels attention takes where its products may be rounded to bf16.
#ifndef STOF_CPU_ATTENTION_BF16_KERNELS_H_
#define STOF_CPU_ATTENTION_BF16_KERNELS_H_

#include <optional>

#include "cpu/attention/attention.h"
#include "cpu/isa.h"

namespace stof {

// The set whose kernels compute products in bf16 where `isa` is the best that may run: the best one up to it that has
// such kernels. That of AMX needs a permission of the process, which is asked for here; where it is refused, the set
// before. None: products are computed in fp32.
std::optional<CpuIsa> IsaOfBf16Kernels(CpuIsa isa);

namespace cpu {

// The kernels for a call; nullptr where it does not allow bf16, or where there are none.
const AttentionKernels* Bf16KernelsOf(const AttentionArgs& args, const CpuAttentionConfig& config);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_BF16_KERNELS_H_
