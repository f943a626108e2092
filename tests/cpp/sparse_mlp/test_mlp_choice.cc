// SPDX-License-Identifier: Apache-2.0
// The choice of a sparse MLP's kernels, which needs no device.
#include <set>
#include <string>
#include <vector>

#include "cuda/sparse_mlp/choose.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

cuda::SparseMlpProblem MakeProblem(int64_t tokens) {
  cuda::SparseMlpProblem problem;
  problem.T = tokens, problem.K = 4096, problem.F = 11008, problem.N = 4096;
  problem.has_rows = true;
  problem.is_down_tiled = tokens >= 2 && tokens <= 16;
  problem.sm_count = 132;
  return problem;
}

cuda::KernelRequest Named(const char* name) {
  cuda::KernelRequest request;
  request.name = name;
  return request;
}

std::string Choose(const cuda::SparseMlpProblem& problem, const char* name = "") {
  return Print(cuda::ListMlpPlans(problem, Named(name)).front());
}

TEST(MlpChoiceFollowsTheTokens) {
  CHECK(Choose(MakeProblem(1)) == "lists-1, 16 splits", Choose(MakeProblem(1)));
  CHECK(Choose(MakeProblem(2)) == "lists-4, 16 splits", Choose(MakeProblem(2)));
  CHECK(Choose(MakeProblem(8)) == "lists-8, 16 splits", Choose(MakeProblem(8)));
  CHECK(Choose(MakeProblem(9)) == "lists-16, 16 splits", Choose(MakeProblem(9)));
  CHECK(Choose(MakeProblem(17)) == "gemms", Choose(MakeProblem(17)));
  cuda::SparseMlpProblem problem = MakeProblem(9);
  problem.is_down_tiled = false;
  CHECK(Choose(problem) == "lists-8, 8 splits", Choose(problem));
  problem.F = 30;  // at least eight neurons a split
  CHECK(Choose(problem) == "lists-8, 3 splits", Choose(problem));
}

TEST(MlpChoiceKnowsWhatGemmsCannot) {
  for (const char* const request : {"", "gemms"}) {
    cuda::SparseMlpProblem problem = MakeProblem(64);
    problem.dtype = DType::kF32;
    CHECK(Choose(problem, request).find("lists-") == 0, Choose(problem, request));
    problem = MakeProblem(64);
    problem.F = int64_t{1} << 28;
    CHECK(Choose(problem, request).find("lists-") == 0, Choose(problem, request));
    problem = MakeProblem(64);
    problem.K = 0;
    CHECK(Choose(problem, request).find("lists-") == 0, Choose(problem, request));
    problem.has_rows = false;
    CHECK(Choose(problem, request) == "gemms", Choose(problem, request));
  }
}

TEST(MlpChoiceTakesRequests) {
  CHECK(Choose(MakeProblem(4), "gemms") == "gemms");
  CHECK(Choose(MakeProblem(64), "lists") == "lists-8, 2 splits", Choose(MakeProblem(64), "lists"));
  const Status status = cuda::MlpRequests().Force("list");
  CHECK(!status.ok() && status.message().find("one of lists gemms") != std::string::npos, status.message());
}

// Each member of the key counts.
TEST(MlpChoiceKeysDiffer) {
  const cuda::SparseMlpProblem base = MakeProblem(3);
  std::vector<cuda::SparseMlpProblem> others(9, base);
  ++others[0].T, ++others[1].K, ++others[2].F, ++others[3].N, ++others[4].R;
  others[5].dtype = DType::kBF16, others[6].has_rows = false, others[7].is_down_tiled = false;
  ++others[8].sm_count;
  std::set<uint64_t> hashes = {base.Hash()};
  for (const cuda::SparseMlpProblem& other : others) {
    CHECK(!(other == base) && hashes.insert(other.Hash()).second, Print(other));
  }
  CHECK(Print(base) == "sparse MLP T 3, K 4096, F 11008, N 4096, R 0, fp16, 132 SMs", Print(base));
}

}  // namespace
}  // namespace stof::test
