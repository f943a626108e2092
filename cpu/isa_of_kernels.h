// SPDX-License-Identifier: Apache-2.0
// The instruction set whose kernels of an operator run, given the best set that is allowed.
#ifndef STOF_CPU_ISA_OF_KERNELS_H_
#define STOF_CPU_ISA_OF_KERNELS_H_

#include <optional>

#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "cpu/tile_permission.h"

namespace stof {
namespace cpu {

// Whether kernels of this set use tile registers.
inline bool NeedsTilePermission(CpuIsa isa) { return isa == CpuIsa::kAmxInt8 || isa == CpuIsa::kAmxBf16; }

// The best set up to `isa` that has kernels of its own in this member of the table; none where the table has none.
// Those of AMX need a permission of the process, which is asked for here; where it is refused, the set before them.
template <typename Kernels>
std::optional<CpuIsa> FindIsaOfKernels(CpuIsa isa, const Kernels* KernelTable::* kernels) {
  const Kernels* const own = KernelsOf(isa).*kernels;
  if (own == nullptr) return std::nullopt;
  // Sets without kernels of their own have those of the set before.
  while (static_cast<int>(isa) > 0) {
    const auto before = static_cast<CpuIsa>(static_cast<int>(isa) - 1);
    if (KernelsOf(before).*kernels != own) break;
    isa = before;
  }
  if (!NeedsTilePermission(isa) || MayUseTiles()) return isa;
  // kAvx512Bf16 is the last set without tile registers.
  return FindIsaOfKernels(CpuIsa::kAvx512Bf16, kernels);
}

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ISA_OF_KERNELS_H_
