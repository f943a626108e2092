// SPDX-License-Identifier: Apache-2.0
// Chooses the kernel of a GEMM: the one that is requested, else the fastest by measurement or by the models.
#ifndef STOF_CUDA_GEMM_CHOOSE_H_
#define STOF_CUDA_GEMM_CHOOSE_H_

#include <string>
#include <vector>

#include "cuda/gemm/kernel_table.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// The requests for GEMM kernels; STOF_CUDA_GEMM is their environment variable.
KernelRequests& GemmRequests();

// The plans of a GEMM in the order in which they are tried: each one where those before it cannot run.
//   what is requested, where it can compute the GEMM;
//   the fastest sm90 kernel by the model; before it, where it is slow or the caller prefers that, cuBLASLt's first
//   choice, else behind it;
//   the sm80 kernel, which computes any GEMM.
Status ListGemmPlans(const GemmArgs& args, const GemmProblem& problem, const KernelRequest& request,
                     std::vector<GemmPlan>* plans);

// The plan that was the fastest when this GEMM was first timed: where GemmArgs::may_wait allows it, the first run times
// all that may be the fastest. plan->kernel stays nullptr where it was not timed.
Status FindTimedGemm(const GemmArgs& args, const GemmProblem& problem, const RunContext& context, GemmPlan* plan);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_CHOOSE_H_
