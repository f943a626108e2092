// SPDX-License-Identifier: Apache-2.0
// cuBLASLt as a family of GEMM kernels (kGemmCublasLtFamily), where the process has it and its epilogues say the same.
#ifndef STOF_CUDA_GEMM_CUBLASLT_GEMM_H_
#define STOF_CUDA_GEMM_CUBLASLT_GEMM_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cuda {

// Whether cuBLASLt is there (STOF_CUBLASLT: a path, or 0 for none) and has the function of this GEMM: one matmul, plain
// or with a bias and ReLU or GELU by tanh, or with a bias and a residual. b0 may be transposed.
bool CanUseCublasLt(const GemmArgs& args);
// What all its addresses are a multiple of, as far as that matters to cuBLASLt.
uint32_t CublasLtAlignment(const GemmArgs& args);
// Bytes of partial sums that it may ask for at most.
size_t CublasLtWorkspace(const GemmArgs& args);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_CUBLASLT_GEMM_H_
