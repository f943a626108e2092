// SPDX-License-Identifier: Apache-2.0
// What the GEMM kernels share with the host. docs/design/gemm.md describes them.
#ifndef STOF_CUDA_GEMM_PARAMS_H_
#define STOF_CUDA_GEMM_PARAMS_H_

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Flags instead of pointers that are compared with null: docs/lab/cuda-experiments.md, "Defects of compilers and
// runtimes".
enum GemmHas : int32_t { kHasBias0 = 1, kHasBias1 = 2, kHasScale = 4, kHasRow = 8, kHasResidual = 16 };

// act(p0 + bias0) [* (p1 + bias1)] * scale * row + residual; elements of the output's type.
struct GemmEpilogueParams {
  int32_t has = 0;
  int32_t activation = 0;  // an Activation
  const void* bias0 = nullptr;
  const void* bias1 = nullptr;
  const void* scale = nullptr;
  const void* row = nullptr;
  const void* residual = nullptr;  // [M, N]
};

struct GemmParams {
  int32_t M = 0, N = 0, K = 0;
  int64_t stride = 0;  // of b0 and b1, elements
  const void* a = nullptr;
  const void* b0 = nullptr;
  const void* b1 = nullptr;
  void* output = nullptr;
  GemmEpilogueParams epilogue;
};

// ---- compute capability 8.0 and later ----
// vectors: rows can be read 16 bytes at a time. pair: there is b1. is_b_transposed: b0 is [N, K]. nullptr for a pair
// with a transposed b0.
using GemmLaunch = int (*)(const GemmParams& params, void* stream);
GemmLaunch FindGemmSm80(bool bf16, bool pair, bool vectors, bool is_b_transposed);

// ---- compute capability 9.0 ----
struct GemmSm90Params {
  CUtensorMap a, b0, b1, output;
  GemmEpilogueParams epilogue;
  int32_t M = 0, N = 0, steps = 0;   // of K, 64 at a time
  int32_t m_tiles = 0, n_tiles = 0;  // of a cluster
  int32_t band = 1;                  // of m_tiles, which are taken together for each n
};

// One compiled kernel: a row of a table.
struct GemmKernelEntry {
  const char* name = "";  // of the family; KernelName adds the rest
  int (*launch)(const GemmSm90Params& params, unsigned clusters, void* stream) = nullptr;
  int (*resident)(int* clusters) = nullptr;  // how many clusters the current device holds at once
  int rows = 0, columns = 0;                 // of a CTA's tile; columns of the output
  int cluster_m = 1, cluster_n = 1;          // CTAs of a cluster
  int ctas = 1;                              // of an SM
  bool is_ping_pong = false;
  int algorithm = -1;  // of cuBLASLt
  // Microseconds of a step of 64 of K, of a tile, of a tile's GELU and residual.
  float step = 0, tile = 0, gelu = 0, residual = 0;
};
using GemmKernelTable = ArrayView<GemmKernelEntry>;
struct GemmProblem;
// The table for the problem's type and operands, on whatever device. Empty in a build without sm_90a, and for a pair
// with a transposed b0.
GemmKernelTable FindGemmSm90(const GemmProblem& problem);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_PARAMS_H_
