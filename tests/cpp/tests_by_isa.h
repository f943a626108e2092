// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_TESTS_CPP_TESTS_BY_ISA_H_
#define STOF_TESTS_CPP_TESTS_BY_ISA_H_

#include <cstddef>
#include <iterator>
#include <vector>

#include "cpu/isa.h"
#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"
#include "cpu/tile_permission.h"
#include "tests/cpp/check.h"

namespace stof::test {

// The instruction sets of this machine, up to the one that STOF_CPU_ISA asks for.
inline std::vector<CpuIsa> IsasOfThisMachine() {
  std::vector<CpuIsa> isas;
  for (int isa = 0; isa <= static_cast<int>(BestCpuIsa()); ++isa) {
    if (IsCpuIsaSupported(static_cast<CpuIsa>(isa))) isas.push_back(static_cast<CpuIsa>(isa));
  }
  return isas;
}

// Registers the tests of each of them that has kernels of its own: kernels is their member of the table. rows: those of
// every set of STOF_CPU_ISAS, in its order. Sets whose tile registers this process may not use are left out.
template <typename Kernels, size_t kSets, size_t kTests>
bool RegisterByIsa(const Kernels* cpu::KernelTable::* kernels, const Test (&rows)[kSets][kTests]) {
  const Kernels* last = nullptr;
  for (const CpuIsa isa : IsasOfThisMachine()) {
    const Kernels* const own = cpu::KernelsOf(isa).*kernels;
    if (own == last || (cpu::NeedsTilePermission(isa) && !cpu::MayUseTiles())) continue;
    last = own;
    const auto& row = rows[static_cast<int>(isa)];
    AllTests().insert(AllTests().end(), std::begin(row), std::end(row));
  }
  return true;
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_TESTS_BY_ISA_H_
