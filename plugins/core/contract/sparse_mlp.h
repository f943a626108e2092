// SPDX-License-Identifier: Apache-2.0
// The MLP of active neurons: the arguments of its kernels, the entry points of cpu/, and the table of those of cuda/.
// All matrices are row-major. docs/reference/sparse-mlp.md is the contract.
#ifndef STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_H_
#define STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/base/activation.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

// In the order of kSparseMlpSelections.
enum class SparseMlpSelection : int32_t { kNonzero = 0, kMagnitude, kPredictor };
constexpr const char* kSparseMlpSelections[] = {"nonzero", "magnitude", "predictor"};
// What stands between the factors of a predictor.
constexpr const char* kSparseMlpPredictorActivations[] = {kActivationNames[static_cast<int>(Activation::kNone)],
                                                          kActivationNames[static_cast<int>(Activation::kRelu)]};

// A weight with a row for each neuron, or a factor of the predictor.
struct SparseMlpWeight {
  const void* data = nullptr;  // nullptr: there is none
  const void* scales =
      nullptr;  // of a quantized weight, or of each row of a quantized predictor, of type SparseMlpArgs::dtype
  const void* zero_points = nullptr;  // nullptr: 2^(bits - 1)
  // The CPU: the same weight in bf16, which is read in its place; nullptr: none. Kernels may round what multiplies it.
  const uint16_t* rounded = nullptr;
};

// A weight with a row for each neuron, as kernels read it: of fp32, fp16, bf16, or quantized.
struct NeuronRows {
  const char* data = nullptr;            // nullptr: there is none
  const char* scales = nullptr;          // of each block of a row, or of each row
  const uint8_t* zero_points = nullptr;  // nullptr: 2^(bits - 1)
  int64_t size = 0;                      // values of a row
  int64_t stride = 0;                    // bytes of a row
  int64_t blocks = 0;                    // of a row
  int64_t zero_bytes = 0;                // devices: of the zero points of a row
  int32_t bits = 0;                      // 4 or 8 of quantized values, else 0
  int32_t block_shift = 0;  // log2(block): a 64-bit division costs as much as a short row. Of the down weight a block
                            // is one of neurons, which share a scale in each column
  bool is_vectorized = false;   // devices: chunks are aligned, and rows have whole chunks
  bool has_row_scales = false;  // a scale for each row. On devices the row then is one block
  DType dtype = DType::kF32;    // of values, or of the scales of quantized ones
  int64_t block = 0;            // the CPU: 2^block_shift values
};

struct SparseMlpArgs {
  int64_t T = 0;  // tokens
  int64_t K = 0, F = 0, N = 0, R = 0;
  DType dtype = DType::kF32;  // of every tensor but quantized weights, zero points and the threshold
  Activation activation = Activation::kNone;
  SparseMlpSelection selection = SparseMlpSelection::kNonzero;
  int bits = 0;  // 4 or 8 of quantized weights, else 0
  int64_t block_size = 0;
  int accuracy_level = 0;
  const void* input = nullptr;  // [T, K]; not read without up_weight and gate_weight
  const void* gate = nullptr;   // [T, F]; nullptr with a predictor
  SparseMlpWeight gate_weight, up_weight, down_weight;
  const void *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;  // nullptr: none
  const float* threshold = nullptr;
  int64_t threshold_stride = 0;                  // 0: one for all neurons, else 1
  SparseMlpWeight predictor_down, predictor_up;  // [R, K] and [F, R]
  bool has_predictor_relu = false;               // between these
  void* output = nullptr;                        // [T, N]
};

size_t CpuSparseMlpWorkspace(const SparseMlpArgs& args, CpuIsa isa);
// workspace: CpuSparseMlpWorkspace bytes of the same set, 64-byte aligned, contents arbitrary. T and N are at least 1.
void CpuSparseMlp(const SparseMlpArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel);
// The fewest tokens of a block whose matmuls by rounded weights also round tokens and hidden values to bf16; 0: this
// instruction set never does. Blocks have 64 tokens, the last one of a call those that are left.
int64_t CpuMlpLeastBf16Tokens(CpuIsa isa);
// SparseMlpWeight::rounded: fp32 values to nearest even.
void CpuRoundMlpWeight(CpuIsa isa, const float* from, int64_t count, uint16_t* to);

struct RunContext;
struct SparseMlpBackend {
  // All addresses are the device's. T and N are at least 1.
  Status (*run)(const SparseMlpArgs& args, const RunContext& context) = nullptr;
  // Bytes that `run` asks RunContext::allocate for at most.
  Status (*plan_workspace)(const SparseMlpArgs& args, size_t* bytes) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_H_
