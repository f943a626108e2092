// SPDX-License-Identifier: Apache-2.0
// GEMMs by constant fp32 weights, which are copied once into panels in the order in which kernels read them: what the
// files of the instruction sets share. The entry points are in plugins/core/contract/gemm.h.
#ifndef STOF_CPU_GEMM_PACKED_H_
#define STOF_CPU_GEMM_PACKED_H_

#include <cstdint>

#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cpu {

// Of a, at a time: with a panel of the factor they fit a second-level cache of 1 MiB.
constexpr int64_t kPackedRows = 128;
constexpr int64_t kPackedDepth = 768;
constexpr int64_t kPackedMostColumns = 48;
// Floats of a worker's workspace: a block of each product.
constexpr int64_t kPackedFloats = 2 * kPackedRows * kPackedMostColumns;

struct PackedGemmProblem {
  const CpuPackedGemmArgs* args = nullptr;
  const float* panels = nullptr;  // [panels, products, K, columns of the panel]
  int64_t N = 0, K = 0, products = 1;
  int64_t block = kPackedRows;  // rows of a at a time, at most kPackedRows
};

struct PackedGemmKernels {
  int64_t columns;  // of a panel; the last one has as many as its own need, in whole vectors
  int64_t vector;
  int64_t rows;  // of a tile in registers
  // panel[K, its columns] = b[:, n0 ...], zeros beyond `wide` columns.
  void (*pack)(const float* b, int64_t stride, int64_t K, int64_t wide, float* panel);
  // Columns of one panel of all products, rows m0 ..., and their epilogue. workspace: kPackedFloats.
  void (*run)(const PackedGemmProblem& problem, int64_t m0, int64_t panel, float* workspace);
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_GEMM_PACKED_H_
