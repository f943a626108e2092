// SPDX-License-Identifier: Apache-2.0
// Quantized attention by its contract (docs/reference/quantized-attention.md): integers, and fp64 where the contract
// does not name fp32. It shares no code with the kernels.
#ifndef STOF_TESTS_CPP_QUANTIZED_ATTENTION_QUANTIZED_REFERENCE_H_
#define STOF_TESTS_CPP_QUANTIZED_ATTENTION_QUANTIZED_REFERENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "plugins/core/contract/quantized_attention.h"

namespace stof::test {

// Whether the mask and the padding allow a pair.
using IsAllowed = std::function<bool(int64_t b, int64_t h, int64_t q, int64_t k)>;

struct QuantizedReference {
  std::vector<double> output;  // [B, H, S, Dv]
  // What roundings of weights near a tie may change of each output, and what fp32 sums may.
  std::vector<double> tolerance;
  int64_t ties = 0, weights = 0;
};

// Of args only the output is not read. Padding is part of is_allowed.
QuantizedReference ComputeQuantizedAttention(const QuantizedAttentionArgs& args, const IsAllowed& is_allowed);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_QUANTIZED_ATTENTION_QUANTIZED_REFERENCE_H_
