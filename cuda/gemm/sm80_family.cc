// SPDX-License-Identifier: Apache-2.0
// The sm80 kernel: it computes any GEMM, with rows of any length and alignment.
#include <cuda_runtime.h>

#include "cuda/common/status.h"
#include "cuda/gemm/kernel_table.h"

namespace stof {
namespace cuda {
namespace {

constexpr GemmKernelEntry MakeKernel() {
  GemmKernelEntry kernel;
  kernel.name = "sm80";
  return kernel;
}
constexpr GemmKernelEntry kKernel = MakeKernel();

Status Plan(const GemmArgs&, const GemmProblem&, std::vector<GemmPlan>* plans) {
  GemmPlan plan;
  plan.family = &kGemmSm80Family, plan.kernel = &kKernel;
  plans->push_back(plan);
  return Status();
}

Status Run(const GemmArgs& args, const GemmProblem& problem, const GemmPlan&, const RunContext& context, bool* done) {
  GemmParams p;
  p.M = static_cast<int32_t>(args.M), p.N = static_cast<int32_t>(args.N), p.K = static_cast<int32_t>(args.K);
  p.stride = args.stride;
  p.a = args.a, p.b0 = args.b0, p.b1 = args.b1, p.output = args.output;
  p.epilogue = EpilogueOf(args);
  const GemmLaunch launch =
      FindGemmSm80(args.dtype == DType::kBF16, problem.is_pair, problem.has_vectors, args.is_b_transposed);
  *done = true;
  return ToStatus(static_cast<cudaError_t>(launch(p, context.stream)), "launch of a GEMM");
}

void ListNames(std::vector<std::string>* names) { names->push_back(KernelName(kKernel)); }

}  // namespace

const GemmFamily kGemmSm80Family = {"sm80", Plan, Run, ListNames};

}  // namespace cuda
}  // namespace stof
