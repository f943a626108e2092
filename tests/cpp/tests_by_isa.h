// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_TESTS_CPP_TESTS_BY_ISA_H_
#define STOF_TESTS_CPP_TESTS_BY_ISA_H_

#include <cstddef>
#include <iterator>

#include "cpu/isa.h"
#include "tests/cpp/check.h"

namespace stof::test {

// Registers the tests of each instruction set of this machine. rows: those of every set of STOF_CPU_ISAS, in its order.
template <size_t kSets, size_t kTests>
bool RegisterByIsa(const Test (&rows)[kSets][kTests]) {
  for (int isa = 0; isa <= static_cast<int>(BestCpuIsa()); ++isa) {
    if (!IsCpuIsaSupported(static_cast<CpuIsa>(isa))) continue;
    AllTests().insert(AllTests().end(), std::begin(rows[isa]), std::end(rows[isa]));
  }
  return true;
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_TESTS_BY_ISA_H_
