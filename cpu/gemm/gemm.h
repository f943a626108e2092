// SPDX-License-Identifier: Apache-2.0
// GEMM on the CPU, by blocks: what the files of the instruction sets share. The entry point is in
// plugins/core/contract/gemm.h.
#ifndef STOF_CPU_GEMM_GEMM_H_
#define STOF_CPU_GEMM_GEMM_H_

#include <cstdint>

#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cpu {

// Of a worker's block; multiples of every instruction set's tile. One block of a and one of b fit a second-level cache.
constexpr int64_t kGemmBlockRows = 96;
constexpr int64_t kGemmBlockColumns = 64;
constexpr int64_t kGemmDepth = 256;
// Floats of a worker's workspace.
constexpr int64_t kGemmFloats = (kGemmBlockRows + kGemmBlockColumns) * kGemmDepth + kGemmDepth + 1024;

struct GemmKernels {
  // Computes output[m0 ..., n0 ...], one block. workspace: kGemmFloats.
  void (*block)(const CpuGemmArgs& args, int64_t m0, int64_t n0, float* workspace);
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_GEMM_GEMM_H_
