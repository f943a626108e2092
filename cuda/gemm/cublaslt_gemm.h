// SPDX-License-Identifier: Apache-2.0
// cuBLASLt as one of the GEMM kernels, where the process has it and its epilogues say the same.
#ifndef STOF_CUDA_GEMM_CUBLASLT_GEMM_H_
#define STOF_CUDA_GEMM_CUBLASLT_GEMM_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cuda {

// Whether cuBLASLt is there (STOF_CUBLASLT: a path, or 0 for none) and has the function of this GEMM: one matmul, plain
// or with a bias and ReLU or GELU by tanh, or with a bias and a residual. b0 may be transposed.
bool LtFits(const GemmArgs& args);
// What all its addresses are a multiple of, as far as that matters to cuBLASLt.
uint32_t LtAlignment(const GemmArgs& args);
// How many algorithms it proposes, its own first choice first; 0 where it has none.
int LtAlgorithms(const GemmArgs& args, bool workspace, int device);
// Bytes of partial sums that it may ask for at most.
size_t LtWorkspace(const GemmArgs& args);
// Queues the GEMM; *done is false where that algorithm does not compute it or there is no memory for its partial
// sums.
Status RunLt(const GemmArgs& args, const RunContext& context, int device, int algorithm, bool* done);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_CUBLASLT_GEMM_H_
