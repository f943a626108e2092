// SPDX-License-Identifier: Apache-2.0
// Runs cases of attention on the CPU, against the definition.
#ifndef STOF_TESTS_CPP_CPU_ATTENTION_CPU_CASES_H_
#define STOF_TESTS_CPP_CPU_ATTENTION_CPU_CASES_H_

#include <cstdint>
#include <vector>

#include "cpu/isa.h"
#include "tests/cpp/attention/attention_problem.h"

namespace stof::test::attention {

// With 1 thread and with those of the team: results have the same bits.
void RunCase(const Case& c, CpuIsa isa, uint64_t seed, const Parallel& team);
// With 1 and 3 threads, which get little memory.
void RunCases(const std::vector<Case>& cases, CpuIsa isa);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_CPU_ATTENTION_CPU_CASES_H_
