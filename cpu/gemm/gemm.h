// SPDX-License-Identifier: Apache-2.0
// Matrix products on the CPU, by blocks: what the instruction sets' files share. The entry point is in
// plugins/core/gemm/gemm.h.
#ifndef STOF_CPU_GEMM_GEMM_H_
#define STOF_CPU_GEMM_GEMM_H_

#include <cstdint>

#include "plugins/core/contract/kernels.h"

namespace stof {
namespace cpu {

// Of a worker's block; multiples of every instruction set's tile. One block of a and one of b fit a second-level cache.
constexpr int64_t kGemmBlockRows = 96;
constexpr int64_t kGemmBlockColumns = 64;
constexpr int64_t kGemmDepth = 256;
// Floats of a worker's workspace.
constexpr int64_t kGemmFloats = (kGemmBlockRows + kGemmBlockColumns) * kGemmDepth + kGemmDepth + 1024;

struct GemmProblem {
  int64_t M = 0, N = 0, K = 0, stride = 0;
  DType dtype = DType::kF32;
  const void *a = nullptr, *b = nullptr;
  float* product = nullptr;
};

// product[m0 ..., n0 ...], one block. workspace: kGemmFloats.
using GemmBlockFunction = void (*)(const GemmProblem& problem, int64_t m0, int64_t n0, float* workspace);
namespace portable {
void GemmBlock(const GemmProblem& problem, int64_t m0, int64_t n0, float* workspace);
}
namespace avx2 {
void GemmBlock(const GemmProblem& problem, int64_t m0, int64_t n0, float* workspace);
}

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_GEMM_GEMM_H_
