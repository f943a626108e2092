// SPDX-License-Identifier: Apache-2.0
// The choice of a GEMM kernel, as far as it needs no device: names, requests, keys and plans.
#include <set>
#include <string>
#include <vector>

#include "cuda/gemm/choose.h"
#include "tests/cpp/check.h"
#include "tests/cpp/forced_kernel.h"

namespace stof::test {
namespace {

// A device that runs no sm90 kernel, and rows that cuBLASLt is not asked about: the sm80 kernel alone.
cuda::GemmProblem MakeProblem() {
  cuda::GemmProblem problem;
  problem.capability = 80;
  problem.M = 64, problem.N = 96, problem.K = 31, problem.stride = 96;
  return problem;
}

TEST(GemmChoiceNamesAreDistinct) {
  for (const bool is_pair : {false, true}) {
    for (const bool is_b_transposed : {false, true}) {
      cuda::GemmProblem problem;
      problem.is_pair = is_pair, problem.is_b_transposed = is_b_transposed;
      std::set<std::string> names;
      const cuda::GemmKernelTable kernels = cuda::FindGemmSm90(problem);
      for (const cuda::GemmKernelEntry& kernel : kernels) {
        const std::string name = KernelName(kernel);
        CHECK(names.insert(name).second, name, " is the name of two kernels");
        // What a table has can be asked for.
        const ForcedKernel forced(cuda::GemmRequests(), name);
      }
    }
  }
}

TEST(GemmChoiceRefusesUnknownNames) {
  for (const char* const name : {"sm9", "lt", "1000", "-1", "sm90-1x1x1"}) {
    const Status status = cuda::GemmRequests().Force(name);
    CHECK(!status.ok() && status.message().find(name) != std::string::npos, name);
    for (const char* const expected : {" cublaslt", " cublaslt-7", " sm80"}) {
      CHECK(status.message().find(expected) != std::string::npos, status.message());
    }
  }
}

TEST(GemmChoiceEndsWithTheKernelForAll) {
  GemmArgs args;
  args.M = 64, args.N = 96, args.K = 31, args.stride = 96;
  const cuda::GemmProblem problem = MakeProblem();
  for (const char* const name : {"", "sm80", "sm90", "cublaslt-3"}) {
    const ForcedKernel forced(cuda::GemmRequests(), name);
    cuda::KernelRequest request;
    CHECK(cuda::GemmRequests().Get("", 0, &request).ok());
    std::vector<cuda::GemmPlan> plans;
    CHECK(cuda::ListGemmPlans(args, problem, request, &plans).ok());
    CHECK(!plans.empty(), name);
    for (const cuda::GemmPlan& plan : plans) CHECK(Print(plan) == "sm80" && plan == plans[0], name, Print(plan));
  }
}

// Each member of the key counts.
TEST(GemmChoiceKeysDiffer) {
  const cuda::GemmProblem base = MakeProblem();
  std::vector<cuda::GemmProblem> others(15, base);
  others[0].device = 1, others[1].capability = 90, others[2].dtype = DType::kBF16;
  others[3].activation = Activation::kSilu, others[4].epilogue = 4, others[5].is_pair = true;
  others[6].is_b_transposed = true, others[7].has_vectors = true, others[8].prefers_cublaslt = true;
  others[9].cublaslt_alignment = 16, others[10].workspace = 1, others[11].M = 65, others[12].N = 97;
  others[13].K = 32, others[14].stride = 104;
  std::set<uint64_t> hashes = {base.Hash()};
  for (const cuda::GemmProblem& other : others) {
    CHECK(!(other == base), Print(other));
    CHECK(hashes.insert(other.Hash()).second, Print(other));
  }
  CHECK(Print(base) == "GEMM M 64, N 96, K 31, fp16, unaligned rows, compute capability 8.0", Print(base));
}

TEST(GemmChoicePlansPrint) {
  cuda::GemmKernelEntry kernel;
  kernel.name = "sm90", kernel.rows = 128, kernel.columns = 256, kernel.cluster_m = 2;
  cuda::GemmPlan plan;
  CHECK(Print(plan) == "no kernel", Print(plan));
  plan.kernel = &kernel, plan.cluster = 2, plan.persistent = 66, plan.splits = 3, plan.workspace = 64;
  cuda::GemmPlan timed = plan;
  timed.nanoseconds = 31249.0;
  CHECK(timed == plan && timed.Hash() == plan.Hash());
  CHECK(
      Print(timed) ==
          "sm90-128x256x1-cluster2x1, 3 splits, cluster of 2, 66 persistent, 64 bytes of workspace, 31.2 us predicted",
      Print(timed));
  timed.persistent = 65;
  CHECK(!(timed == plan) && timed.Hash() != plan.Hash());
}

}  // namespace
}  // namespace stof::test
