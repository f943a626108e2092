// SPDX-License-Identifier: Apache-2.0
// The sparse MLP's matmuls of many tokens with factors in bf16 and fp32 sums: what sparse_mlp_bf16_kernels.cc gives to
// the other kernels. Weights are rounded before; tokens and hidden values are rounded in each call.
#ifndef STOF_CPU_SPARSE_MLP_SPARSE_MLP_BF16_H_
#define STOF_CPU_SPARSE_MLP_SPARSE_MLP_BF16_H_

#include <cstdint>

#include "cpu/sparse_mlp/sparse_mlp.h"

namespace stof {
namespace cpu {

// The fewest tokens of a block that is multiplied in bf16. With fewer a call waits for weights, and matmuls in bf16 are
// slower: 8 tokens 11.9 -> 13.7 ms (docs/lab/cpu-experiments.md).
constexpr int64_t kLeastBf16Tokens = 16;
// Rows of bf16 tokens are padded to a multiple of it: the depth of a tile register.
constexpr int64_t kBf16Padding = 32;

// Values of a panel of tokens of `size` values.
STOF_ALWAYS_INLINE int64_t Bf16PanelValues(int64_t size) {
  return (size + kBf16Padding - 1) / kBf16Padding * kBf16Padding * kPanelTokens;
}

struct SparseMlpBf16Kernels {
  // A panel of `tokens` tokens, at most kPanelTokens, rounded: [padded size / 2, kPanelTokens, 2], zeros beyond.
  // rounded: the same numbers as rows in fp32, `stride` apart as those of x, zeros up to a multiple of kMlpPadding.
  void (*fill_panel)(const float* x, int64_t stride, int64_t tokens, int64_t size, uint16_t* panel, float* rounded);
  // SparseMlpKernels::dots for rows in bf16, at most kMlpNeurons, and all tokens of DotProblem::x_bf16.
  void (*dots)(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
               int64_t token_stride);
  // SparseMlpKernels::down for rows in bf16, without panel sums. Finite rows are added to all tokens: hidden values of
  // idle pairs are 0.
  void (*down)(const MlpBlock& block, int64_t part, int64_t first, int64_t last);
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_SPARSE_MLP_BF16_H_
