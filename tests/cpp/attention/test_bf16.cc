// SPDX-License-Identifier: Apache-2.0
// Attention with products in bf16, by every instruction set of this machine that has kernels for them, against the
// definition.
#include <cmath>
#include <iterator>

#include "cpu/kernel_table.h"
#include "tests/cpp/attention/cpu_cases.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::attention {
namespace {

std::vector<Case> InBf16(std::vector<Case> cases) {
  for (Case& c : cases) c.bf16 = true;
  return cases;
}

void RunTable(CpuIsa isa) {
  std::vector<Case> cases = ListedCases();
  const std::vector<Case> drawn = DrawnCases(Cases(300));
  cases.insert(cases.end(), drawn.begin(), drawn.end());
  RunCases(InBf16(cases), isa);
}

void RunLargeScores(CpuIsa isa) { RunCases(InBf16(LargeScoreCases(Cases(120))), isa); }

// Registers the tests of each instruction set of this machine that has kernels.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported)                                       \
  {{"Bf16AttentionEqualsTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }}, \
   {"Bf16AttentionOfLargeScores[" #name "]", [] { RunLargeScores(CpuIsa::id); }}},
  static constexpr Test kRows[][2] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  for (const CpuIsa isa : IsasOfThisMachine()) {
    if (cpu::KernelsOf(isa).attention_bf16 == nullptr) continue;
    const auto& row = kRows[static_cast<int>(isa)];
    AllTests().insert(AllTests().end(), std::begin(row), std::end(row));
  }
  return true;
}();

}  // namespace
}  // namespace stof::test::attention
