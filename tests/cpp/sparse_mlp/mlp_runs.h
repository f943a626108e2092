// SPDX-License-Identifier: Apache-2.0
// Runs of the sparse MLP's CPU kernels, and their comparison with the definition.
#ifndef STOF_TESTS_CPP_SPARSE_MLP_MLP_RUNS_H_
#define STOF_TESTS_CPP_SPARSE_MLP_MLP_RUNS_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/sparse_mlp/mlp_problem.h"

namespace stof::test::sparse_mlp {

// What CpuSparseMlp writes into a poisoned output. workspace: CpuSparseMlpWorkspace bytes at least.
inline std::vector<char> RunIn(void* workspace, const SparseMlpArgs& given, CpuIsa isa, const Parallel& parallel) {
  SparseMlpArgs args = given;
  std::vector<char> output(static_cast<size_t>(args.T * args.N * SizeOf(args.dtype)), static_cast<char>(0xff));
  args.output = output.data();
  CpuSparseMlp(args, isa, workspace, parallel);
  return output;
}

// What CpuSparseMlp writes with a poisoned workspace of exactly CpuSparseMlpWorkspace bytes.
inline std::vector<char> Run(const SparseMlpArgs& args, CpuIsa isa, const Parallel& parallel) {
  const size_t bytes = CpuSparseMlpWorkspace(args, isa);
  const std::unique_ptr<void, void (*)(void*)> workspace(std::aligned_alloc(64, std::max<size_t>(64, bytes)),
                                                         std::free);
  std::memset(workspace.get(), 0xff, bytes);  // NaN in every type: 0 times a value that nobody wrote shows
  return RunIn(workspace.get(), args, isa, parallel);
}

inline void CheckOutput(const Problem& problem, const std::vector<char>& found, const std::string& where) {
  std::vector<double> expected, tolerance;
  problem.Expect(&expected, &tolerance);
  const int64_t item = SizeOfFloat(problem.c.dtype);
  for (size_t i = 0; i < expected.size(); ++i) {
    const double y = LoadFloat(problem.c.dtype, found.data() + static_cast<int64_t>(i) * item);
    CHECK(std::fabs(y - expected[i]) <= tolerance[i], where, " element ", i, ": ", y, ", expected ", expected[i],
          " +- ", tolerance[i]);
  }
}

}  // namespace stof::test::sparse_mlp
#endif  // STOF_TESTS_CPP_SPARSE_MLP_MLP_RUNS_H_
