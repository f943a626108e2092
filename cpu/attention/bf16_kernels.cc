// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/bf16_kernels.h"

#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"

namespace stof {

std::optional<CpuIsa> IsaOfBf16Kernels(CpuIsa isa) {
  return cpu::FindIsaOfKernels(isa, &cpu::KernelTable::attention_bf16);
}

namespace cpu {

const AttentionKernels* Bf16KernelsOf(const AttentionArgs& args, const CpuAttentionConfig& config) {
  if (!args.allow_bf16) return nullptr;
  const std::optional<CpuIsa> isa = IsaOfBf16Kernels(config.isa);
  return isa.has_value() ? KernelsOf(*isa).attention_bf16 : nullptr;
}

}  // namespace cpu
}  // namespace stof
