// SPDX-License-Identifier: Apache-2.0
// The GEMM of the backend: describes it, lets choose.cc choose, and runs the plan.
#include "cuda/gemm/gemm.h"

#include <string>
#include <vector>

#include "cuda/gemm/choose.h"
#include "cuda/gemm/cublaslt_gemm.h"

namespace stof {
namespace cuda {
namespace {

Status CheckNoTransposedPair(const GemmArgs& args) {
  if (!args.is_b_transposed || args.b1 == nullptr) return Status();
  return Status::Error("a pair of matmuls has no kernel for a transposed right operand");
}

// One block of workspace for all plans that are tried, one after the other, of the size that is asked for first.
struct SharedWorkspace {
  const RunContext& context;
  size_t bytes = 0;
  void* data = nullptr;
  static void* Allocate(void* self, size_t bytes) {
    auto* const shared = static_cast<SharedWorkspace*>(self);
    if (shared->data == nullptr) {
      shared->data = shared->context.allocate(shared->context.self, bytes);
      shared->bytes = bytes;
    }
    return bytes <= shared->bytes ? shared->data : nullptr;
  }
};

}  // namespace

std::string KernelName(const GemmKernelEntry& kernel) {
  std::string name = kernel.name;
  if (kernel.rows > 0) {
    name +=
        "-" + std::to_string(kernel.rows) + "x" + std::to_string(kernel.columns) + "x" + std::to_string(kernel.ctas);
  }
  if (kernel.cluster_m * kernel.cluster_n > 1) {
    name += "-cluster" + std::to_string(kernel.cluster_m) + "x" + std::to_string(kernel.cluster_n);
  }
  if (kernel.is_ping_pong) name += "-pingpong";
  return kernel.algorithm < 0 ? name : name + "-" + std::to_string(kernel.algorithm);
}

GemmEpilogueParams EpilogueOf(const GemmArgs& args) {
  GemmEpilogueParams epilogue;
  epilogue.activation = static_cast<int32_t>(args.activation);
  epilogue.bias0 = args.bias0, epilogue.bias1 = args.bias1, epilogue.scale = args.scale;
  epilogue.row = args.row, epilogue.residual = args.residual;
  const auto flag = [&epilogue](const void* p, int32_t bit) { epilogue.has |= p != nullptr ? bit : 0; };
  flag(args.bias0, kHasBias0);
  flag(args.bias1, kHasBias1);
  flag(args.scale, kHasScale);
  flag(args.row, kHasRow);
  flag(args.residual, kHasResidual);
  return epilogue;
}

Status RunGemmAndGetPlan(const GemmArgs& args, const RunContext& context, GemmPlan* plan) {
  STOF_RETURN_IF_ERROR(CheckNoTransposedPair(args));
  SharedWorkspace workspace = {context};
  RunContext shared = context;
  const bool has_workspace = context.allocate != nullptr && args.b1 == nullptr && CublasLtWorkspace(args) > 0;
  shared.allocate = has_workspace ? SharedWorkspace::Allocate : nullptr;
  shared.self = &workspace;
  GemmProblem problem;
  STOF_RETURN_IF_ERROR(DescribeGemm(args, has_workspace, &problem));
  if (problem.capability < 80) {
    return Status::Error("the device has compute capability " + std::to_string(problem.capability / 10) + "." +
                         std::to_string(problem.capability % 10) + ", the CUDA kernels need 8.0 or later");
  }
  bool done = false;
  const auto run = [&](const GemmPlan& candidate) {
    *plan = candidate;
    return candidate.family->run(args, problem, candidate, shared, &done);
  };
  KernelRequest request;
  STOF_RETURN_IF_ERROR(GemmRequests().Get("", 0, &request));
  GemmPlan timed;
  if (request.is_empty()) STOF_RETURN_IF_ERROR(FindTimedGemm(args, problem, shared, &timed));
  if (timed.kernel != nullptr) STOF_RETURN_IF_ERROR(run(timed));
  if (done) return Status();
  std::vector<GemmPlan> plans;
  STOF_RETURN_IF_ERROR(ListGemmPlans(args, problem, request, &plans));
  for (size_t i = 0; i < plans.size() && !done; ++i) STOF_RETURN_IF_ERROR(run(plans[i]));
  return done ? Status() : Status::Error("no kernel computes " + Print(problem));
}

Status RunGemm(const GemmArgs& args, const RunContext& context) {
  GemmPlan plan;
  return RunGemmAndGetPlan(args, context, &plan);
}

Status PlanGemmWorkspace(const GemmArgs& args, size_t* workspace) {
  STOF_RETURN_IF_ERROR(CheckNoTransposedPair(args));
  *workspace = args.most_workspace;
  return Status();
}

}  // namespace cuda
}  // namespace stof
