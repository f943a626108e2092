// SPDX-License-Identifier: Apache-2.0
// GEMMs by constant weights whose factors are rounded to bf16, with sums and epilogue in fp32: what the files of the
// instruction sets share. Weights are rounded once, when they are packed; rows of a by blocks, in every run.
#ifndef STOF_CPU_GEMM_PACKED_BF16_H_
#define STOF_CPU_GEMM_PACKED_BF16_H_

#include <cstdint>

#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cpu {

// Of a, rounded at a time: 768 KiB at K = 768.
constexpr int64_t kBf16Rows = 512;
// Of a task, where there are more tasks than panels.
constexpr int64_t kBf16FewestTaskRows = 64;
// K is padded to a multiple of a set's own unit, which this one is a multiple of.
constexpr int64_t kBf16DepthUnit = 32;
// Floats of a task's workspace: sums of two products, 32 rows of 48 columns at most.
constexpr int64_t kBf16SumRows = 32, kBf16MostColumns = 48;
constexpr int64_t kBf16Floats = 2 * kBf16SumRows * kBf16MostColumns;

struct PackedGemmBf16Problem {
  const CpuPackedGemmArgs* args = nullptr;
  const uint16_t* panels = nullptr;   // [panels, products, padded K, columns of the panel], in the set's own order
  const uint16_t* rounded = nullptr;  // rows of a from `first` on, padded K elements each
  int64_t first = 0;
  int64_t N = 0, K = 0, products = 1;
};

struct PackedGemmBf16Kernels {
  int64_t columns;  // of a panel; the last one has as many as its own need, in whole vectors
  int64_t vector;
  int64_t rows;   // rounded rows are padded to a multiple of it
  int64_t depth;  // K is padded to a multiple of it
  // panel[padded K, its columns] = b[:, n0 ...], zeros beyond K and beyond `wide` columns. dtype: fp32, fp16 or bf16,
  // which is copied.
  void (*pack)(const void* b, DType dtype, int64_t stride, int64_t K, int64_t wide, uint16_t* panel);
  // to[rows, padded K] = a[rows, K] in the set's own order, zeros beyond K and beyond `count` rows.
  void (*round)(const void* a, DType dtype, int64_t K, int64_t count, int64_t rows, uint16_t* to);
  // Columns of one panel of all products, `rows` rows from row m0 of the rounded ones, and their epilogue. workspace:
  // kBf16Floats.
  void (*run)(const PackedGemmBf16Problem& problem, int64_t m0, int64_t rows, int64_t panel, float* workspace);
};

// A run of weights in bf16. workspace: CpuBf16GemmWorkspace bytes.
void RunPackedBf16(const CpuPackedGemmArgs& args, const CpuPackedWeights& weights, void* workspace,
                   const Parallel& parallel);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_GEMM_PACKED_BF16_H_
