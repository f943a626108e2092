// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_GEMM_RUN_H_
#define STOF_CUDA_GEMM_RUN_H_

#include <cstddef>

#include "plugins/core/contract/gemm.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Members of GemmBackend.
Status RunGemm(const GemmArgs& args, const RunContext& context);
Status PlanGemmWorkspace(const GemmArgs& args, size_t* workspace);

// ---- for tests and benchmarks ----
// Kernels by number: those of the 9.0 table from 0 on, and these.
constexpr int kGemmByModel = -1;     // of TakeGemmKernel: no kernel is forced
constexpr int kGemmSm80 = -1;        // of LastGemmKernel: the 8.0 kernel
constexpr int kGemmCublasLt = 1000;  // cuBLASLt; LastGemmKernel adds the number of its algorithm
// Forces one kernel of the 9.0 table, or cuBLASLt wherever it computes the GEMM. The 8.0 kernel takes what they cannot.
void TakeGemmKernel(int index);
// The kernel that ran last.
int LastGemmKernel();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_RUN_H_
