// SPDX-License-Identifier: Apache-2.0
// The interface between the dispatcher of the sparse MLP (sparse_mlp.cc) and the kernels of each instruction set.
// A kernel runs on a thread with 256 KiB of stack.
#ifndef STOF_CPU_SPARSE_MLP_SPARSE_MLP_H_
#define STOF_CPU_SPARSE_MLP_SPARSE_MLP_H_

#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/contract/sparse_mlp.h"

namespace stof {
namespace cpu {

// Tokens of a block: a neuron's mask is a 64-bit word, a bit for each token.
constexpr int64_t kMlpTokens = 64;
// Neurons whose hidden values a task computes at a time: a multiple of the rows of every tile.
constexpr int64_t kMlpNeurons = 48;
// fp32 dot products use panels of kPanelTokens tokens from kManyTokens tokens on.
constexpr int64_t kManyTokens = 32, kPanelTokens = 16;
// The sum over neurons has kMlpParts partial sums, which threads compute in parallel (split-K). Blocks of neurons go to
// them round-robin, since neurons may be sorted by activity. The number is fixed, so the order of additions is, too.
constexpr int64_t kMlpParts = 8;
// Threads that share a part have columns that begin at multiples of it.
constexpr int64_t kColumnUnit = 64;
constexpr int64_t kMlpPartBlock = 64;  // neurons; more where more of them share a scale
// Floats from the sums of a column to those of the next one, where the sums of all tokens lie together.
STOF_ALWAYS_INLINE int64_t PanelSumsStride(int64_t tokens) {
  return (tokens + kPanelTokens - 1) / kPanelTokens * kPanelTokens;
}
// Values of a predictor's row and of a token that are multiplied at a time, where they are quantized.
constexpr int64_t kPredictorBlock = 32;
// Tokens in int8 have zeros up to a multiple of so many values, and the sums of their blocks up to one of so many
// blocks: a vector may read beyond the last block.
constexpr int64_t kInt8TokenPadding = 256;
constexpr int64_t kInt8SumPadding = 16;
// Vectors of tokens begin on multiples of so many floats.
constexpr int64_t kMlpPadding = 16;

// Bytes of the first `values` values of a row, rounded down.
STOF_ALWAYS_INLINE int64_t BytesOf(const NeuronRows& rows, int64_t values) {
  return rows.bits > 0 ? values * rows.bits / 8 : values * SizeOf(rows.dtype);
}

struct SparseMlpBf16Kernels;

// Dot products of rows and tokens.
struct DotProblem {
  NeuronRows rows;
  const float* x = nullptr;  // [tokens, x_stride], zeros from rows.size to the next multiple of kMlpPadding
  int64_t x_stride = 0;
  // Many tokens once more: [panels, rows.size, kPanelTokens], zeros beyond the last token; else nullptr.
  const float* x_panels = nullptr;
  // The tokens rounded to bf16, in the panels of SparseMlpBf16Kernels::fill_panel. Where they are set, x holds the same
  // rounded values in fp32, so that dense and sparse tiles multiply equal numbers. nullptr: tokens are not rounded.
  const uint16_t* x_bf16 = nullptr;
  const SparseMlpBf16Kernels* bf16 = nullptr;  // set with x_bf16
  // The tokens in int8, in blocks of rows.block values. x_scales: of each 32 / bits values; x_sums: of each block, the
  // scale times the sum of its values. nullptr: they are multiplied in fp32.
  const int8_t* x_int8 = nullptr;
  const float *x_scales = nullptr, *x_sums = nullptr;
  int64_t x_int8_stride = 0, x_scales_stride = 0, x_sums_stride = 0;
  int64_t tokens = 0;
  int64_t count = 0;                 // of rows
  const int32_t* neurons = nullptr;  // row i is that of neurons[i]; nullptr: of neuron i
  const uint64_t* masks = nullptr;   // bit t: token t needs row i; nullptr: all of them
};

// The neuron of row i.
STOF_ALWAYS_INLINE int64_t NeuronOf(const DotProblem& problem, int64_t i) {
  return problem.neurons != nullptr ? problem.neurons[i] : i;
}

// The bits of all tokens of a block.
STOF_ALWAYS_INLINE uint64_t BitsOfTokens(int64_t tokens) {
  return tokens == kMlpTokens ? ~uint64_t{0} : (uint64_t{1} << tokens) - 1;
}

// Pairs of a row and a token that needs it.
STOF_ALWAYS_INLINE int64_t CountPairs(const uint64_t* masks, int64_t count) {
  int64_t pairs = 0;
  for (int64_t i = 0; i < count; ++i) pairs += __builtin_popcountll(masks[i]);
  return pairs;
}

// A block of tokens.
struct MlpBlock {
  const SparseMlpArgs* args = nullptr;
  int64_t tokens = 0;
  const char* gate = nullptr;  // of the first token; nullptr with a predictor
  DotProblem gate_dots, up_dots;
  NeuronRows down;
  float* values = nullptr;    // [tokens, F]: activated gate values, or a predictor's scores
  uint64_t* masks = nullptr;  // [F]: bit t: the neuron is active for token t
  // The neurons that are active for some token: those of part p are [part_begin[p], part_begin[p + 1]), in their order.
  int64_t count = 0;
  int64_t part_begin[kMlpParts + 1] = {};
  int32_t* neurons = nullptr;
  uint64_t* list_masks = nullptr;
  float* hidden = nullptr;     // [count, tokens]
  bool rounds_hidden = false;  // to numbers of bf16: the down matmul has factors in bf16
  // [kMlpParts, tokens, sums_stride]; with has_panel_sums [kMlpParts, sums_stride, PanelSumsStride(tokens)].
  float* sums = nullptr;
  int64_t sums_stride = 0;
  bool has_panel_sums = false;  // most pairs of a neuron of the list and a token are needed, by many tokens
  char* output = nullptr;       // of the first token
};

struct SparseMlpKernels {
  // to[count] = from[count] in fp32, then zeros up to `padded`.
  void (*load)(const void* from, DType dtype, int64_t count, int64_t padded, float* to);
  // to[count] = from[count] rounded to bf16.
  void (*round)(const float* from, int64_t count, uint16_t* to);
  // A panel of `tokens` tokens, at most kPanelTokens, for DotProblem.
  void (*fill_panel)(const float* x, int64_t stride, int64_t tokens, int64_t size, float* panel);
  // A token of `size` values in int8, for DotProblem.
  void (*quantize)(const float* x, int64_t size, int bits, int64_t block, int8_t* values, float* scales, float* sums);
  // out[(i - first) * row_stride + t * token_stride] = row i · token t, rows [first, last). An element
  // whose token does not need the row is computed or left as it was.
  void (*dots)(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
               int64_t token_stride);
  // Values and masks of neurons [first, last), at most kMlpNeurons * 16.
  void (*select)(const MlpBlock& block, int64_t first, int64_t last);
  // Hidden values of active neurons [first, last), at most kMlpNeurons.
  void (*hidden)(const MlpBlock& block, int64_t first, int64_t last);
  // Columns [first, last) of a part's sums; first is a multiple of kColumnUnit.
  void (*down)(const MlpBlock& block, int64_t part, int64_t first, int64_t last);
  // Columns [first, last) of the output, from the sums of all parts.
  void (*finish)(const MlpBlock& block, int64_t first, int64_t last);
};
constexpr int64_t kMlpSelected = kMlpNeurons * 16;

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_SPARSE_MLP_H_
