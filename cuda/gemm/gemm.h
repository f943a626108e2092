// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_GEMM_GEMM_H_
#define STOF_CUDA_GEMM_GEMM_H_

#include <cstddef>

#include "cuda/gemm/kernel_table.h"
#include "plugins/core/contract/gemm.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Members of GemmBackend.
Status RunGemm(const GemmArgs& args, const RunContext& context);
Status PlanGemmWorkspace(const GemmArgs& args, size_t* workspace);

// RunGemm, for tests and benchmarks: also gives the plan that was run.
Status RunGemmAndGetPlan(const GemmArgs& args, const RunContext& context, GemmPlan* plan);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_GEMM_H_
