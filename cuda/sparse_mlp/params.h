// SPDX-License-Identifier: Apache-2.0
// What the kernels of the sparse MLP share with the host. docs/design/sparse-mlp-cuda.md describes them.
#ifndef STOF_CUDA_SPARSE_MLP_PARAMS_H_
#define STOF_CUDA_SPARSE_MLP_PARAMS_H_

#include <cstdint>

#include "plugins/core/contract/sparse_mlp.h"

namespace stof {
namespace cuda {

// Tokens of a launch: a bit each of a 64-bit word says which of them need a neuron.
constexpr int kMlpTokens = 64;
// The active neurons are listed in segments of neurons. Their counts fit the shared memory of a CTA.
constexpr int kMlpLeastSegment = 32;
constexpr int kMlpMostSegments = 1024;
// Values that a lane reads at a time.
constexpr int kMlpChunk = 8;
constexpr int kMlpSliceColumns = 32 * kMlpChunk;  // of the output: what a warp of the down kernel sums
constexpr int kMlpMostSplits = 64;                // of the list of active neurons in the down kernel
constexpr int kMlpThreads = 256;
constexpr int kMlpWarps = kMlpThreads / 32;

// A launch of 2 to kMlpTileTokens tokens runs on tensor cores, where weights are vectorized, and fp16 or bf16 (a
// predictor's also int8).
constexpr int kMlpTileTokens = 16;
constexpr bool TakesTiles(int64_t tokens) { return tokens >= 2 && tokens <= kMlpTileTokens; }

// One launch of each kernel: up to kMlpTokens tokens.
struct MlpParams {
  int32_t T = 0;
  int64_t K = 0, F = 0, N = 0, R = 0;
  Activation activation = Activation::kNone;
  SparseMlpSelection selection = SparseMlpSelection::kNonzero;
  const void* input = nullptr;  // [T, K]
  const void* gate = nullptr;   // [T, F], or nullptr
  NeuronRows gate_rows, up_rows, down_rows, predictor_down, predictor_up;
  const void *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
  const float* threshold = nullptr;
  int64_t threshold_stride = 0;
  bool has_predictor_relu = false;  // between the factors of the predictor
  void* output = nullptr;           // [T, N]

  // ---- workspace ----
  float* projected = nullptr;  // [T, projected_stride]: predictor_down · input, zeros beyond R
  int64_t projected_stride = 0;
  // Segment s has counts[s] active neurons: neurons[s * segment + i], and masks, whose bit t says that token t needs
  // it.
  int64_t segment = 0;
  int32_t segments = 0;
  int32_t* counts = nullptr;
  int32_t* neurons = nullptr;
  uint64_t* masks = nullptr;
  float* hidden = nullptr;      // [active neurons, T], of pairs that are needed
  float* partials = nullptr;    // [splits, T, N]
  int32_t* finished = nullptr;  // [token groups, slices]: CTAs of the down kernel that have written their partial sums
  int32_t splits = 1, slices = 1, token_groups = 1, group_tokens = 1;
  // The hidden kernel runs before the down kernel, which then reads hidden values from the workspace, and may read the
  // list before it waits: the hidden kernel lets it start only when the list is complete.
  bool runs_hidden_kernel = false;
};

// For many tokens, a CTA of the project and score kernels has so many tokens and rows of a predictor's factor.
constexpr int kManyTokens = 64;
constexpr int kManyRows = 128;
// The terms whose sum is an fp32 value: 2 in fp16, 3 in bf16.
constexpr int kMostTerms = 3;

// The kernels by which a predictor selects the neurons of many tokens, in fp16 or bf16 (select_many.cuh).
struct MlpSelectManyParams {
  int64_t T = 0, K = 0, F = 0, R = 0;
  const void* input = nullptr;           // [T, K]
  const void* predictor_down = nullptr;  // [R, K]; without scales where it was quantized, as is predictor_up
  const void* predictor_up = nullptr;    // [F, R]
  const void* down_scales = nullptr;     // [R]; nullptr: not quantized
  const void* up_scales = nullptr;       // [F]
  bool is_down_vectorized = false, is_up_vectorized = false;  // rows of tokens and of the factor
  const float* threshold = nullptr;
  int64_t threshold_stride = 0;
  bool has_predictor_relu = false;  // between the factors

  // ---- workspace ----
  int32_t splits = 1;               // of the K values of a dot product of predictor_down
  int64_t split_values = 0;         // of a split, a multiple of 8
  int64_t projected_stride = 0;     // R, rounded up to a multiple of 8
  float* partials = nullptr;        // [splits, T, projected_stride]
  void* terms = nullptr;            // [terms, T, projected_stride]
  float* inverse_scales = nullptr;  // [T]: the dot products of a token's terms are multiplied by it
  uint32_t* masks = nullptr;        // [T, mask_words]
  int64_t mask_words = 0;           // F / 32, rounded up
};

// A weight that is dequantized.
struct MlpDequantizeParams {
  NeuronRows rows;
  int64_t count = 0;     // rows
  bool is_down = false;  // its scales are those of a column and a group of neurons, not of a row
  bool applies_scales = true;
  void* weight = nullptr;  // [count, size of a row]
};

// The kernel between the GEMMs of many tokens, in fp16 or bf16. hidden may be the memory of gate or up_matmul.
struct MlpMaskedHiddenParams {
  int64_t T = 0, F = 0;
  Activation activation = Activation::kNone;
  SparseMlpSelection selection = SparseMlpSelection::kNonzero;
  const void* gate = nullptr;       // [T, F], to which gate_bias is added
  const void* up_matmul = nullptr;  // [T, F]; nullptr without an up weight
  const void* gate_bias = nullptr;
  const void* up_bias = nullptr;
  const float* threshold = nullptr;
  int64_t threshold_stride = 0;
  const uint32_t* masks = nullptr;  // [T, mask_words] of a predictor: bit j % 32 of word j / 32 is that of neuron j
  int64_t mask_words = 0;
  void* hidden = nullptr;  // [T, F]
  bool is_vectorized = false;
};

// Launches of the kernels for a type of tokens. Each gives a cudaError_t.
struct MlpKernels {
  int (*project)(const MlpParams& params, void* stream);
  int (*score)(const MlpParams& params, void* stream);
  int (*select)(const MlpParams& params, void* stream);
  int (*hidden)(const MlpParams& params, int ctas, void* stream);
  int (*down)(const MlpParams& params, void* stream);
  // nullptr with fp32.
  int (*select_many)(const MlpSelectManyParams& params, void* stream);
  int (*dequantize)(const MlpDequantizeParams& params, int ctas, void* stream);
  int (*masked_hidden)(const MlpMaskedHiddenParams& params, void* stream);
};
const MlpKernels& MlpKernelsF32();
const MlpKernels& MlpKernelsF16();
const MlpKernels& MlpKernelsBf16();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_PARAMS_H_
