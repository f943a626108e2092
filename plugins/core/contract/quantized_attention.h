// SPDX-License-Identifier: Apache-2.0
// Attention over int8 and uint8 codes: the arguments of its kernels and the entry points of cpu/.
// docs/reference/quantized-attention.md is the contract.
#ifndef STOF_PLUGINS_CORE_CONTRACT_QUANTIZED_ATTENTION_H_
#define STOF_PLUGINS_CORE_CONTRACT_QUANTIZED_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/attention_args.h"

namespace stof {

// How numbers and codes of 8 bits correspond: number = (code - zero_point) * scale.
struct Quantization {
  float scale = 0.0f;  // 0: there is no rounding
  int32_t zero_point = 0;
  bool is_signed = false;  // codes are int8, else uint8
  STOF_ALWAYS_INLINE bool given() const { return scale != 0.0f; }
  // The lowest code. Kernels have unsigned codes: code - least(), 0 to 255.
  STOF_ALWAYS_INLINE int32_t least() const { return is_signed ? -128 : 0; }
  STOF_ALWAYS_INLINE int32_t zero_code() const { return zero_point - least(); }
};

struct QuantizedAttentionArgs {
  // Shape, strides, scale, bias, mask and output. Query, key and value have elements of one byte, whatever
  // shape.dtype says, which is that of the output: fp32. Of scores: scale and bias alone.
  AttentionArgs attention;
  Quantization query, key, value;
  // Roundings of products, of products times scale, of these plus the bias, in this order; absent ones have no scale.
  Quantization score, scaled_score, biased_score;
  Quantization weight;
  // The weight's scale is that of the largest weight of the whole tensor, and `weight` is not read: codes are uint8.
  bool has_dynamic_weights = false;
};

struct CpuQuantizedAttentionConfig {
  CpuIsa isa{};
  int m = 0;  // query rows of a tile
  int n = 0;  // keys of a tile
};
// The set whose kernels run where `isa` is the best that may: the best one up to it that has kernels of its own. Those
// of AMX need a permission of the process, which is asked for here; where it is refused, the set before.
CpuIsa IsaOfQuantizedAttention(CpuIsa isa);
// The tile that suits the problem; the block mask has exactly this tile.
CpuQuantizedAttentionConfig ChooseCpuQuantizedAttention(const QuantizedAttentionArgs& args);
// Where no block mask is given, all keys count.
size_t CpuQuantizedAttentionWorkspace(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config,
                                      int threads);
// args and config as given to CpuQuantizedAttentionWorkspace; workspace: its bytes, 64-byte aligned, contents
// arbitrary.
Status CpuQuantizedAttention(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config,
                             void* workspace, const Parallel& parallel);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_QUANTIZED_ATTENTION_H_
