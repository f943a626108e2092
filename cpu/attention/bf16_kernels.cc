// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/bf16_kernels.h"

#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "cpu/tile_permission.h"

namespace stof {

std::optional<CpuIsa> IsaOfBf16Kernels(CpuIsa isa) {
  const cpu::AttentionKernels* const own = cpu::KernelsOf(isa).attention_bf16;
  if (own == nullptr) return std::nullopt;
  // Sets without kernels of their own have those of the set before.
  while (static_cast<int>(isa) > 0) {
    const auto before = static_cast<CpuIsa>(static_cast<int>(isa) - 1);
    if (cpu::KernelsOf(before).attention_bf16 != own) break;
    isa = before;
  }
  if (isa != CpuIsa::kAmxBf16 || cpu::MayUseTiles()) return isa;
  return IsaOfBf16Kernels(CpuIsa::kAvx512Bf16);
}

namespace cpu {

const AttentionKernels* Bf16KernelsOf(const AttentionArgs& args, const CpuAttentionConfig& config) {
  if (!args.allow_bf16) return nullptr;
  const std::optional<CpuIsa> isa = IsaOfBf16Kernels(config.isa);
  return isa.has_value() ? KernelsOf(*isa).attention_bf16 : nullptr;
}

}  // namespace cpu
}  // namespace stof
