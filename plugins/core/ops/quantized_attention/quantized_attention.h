// SPDX-License-Identifier: Apache-2.0
// StofQuantizedAttention: docs/reference/quantized-attention.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_

#include "plugins/core/contract/op.h"

namespace stof {

struct QuantizedAttentionLimits {
  static constexpr DType kTypes[] = {DType::kF32};  // of the output
  static constexpr int kMostOperands = 28;
  // Words of attribute `operands`, beside table0, table1, ...
  static constexpr const char* kRoles[] = {"query_scale",
                                           "query_zero_point",
                                           "key_scale",
                                           "key_zero_point",
                                           "value_scale",
                                           "value_zero_point",
                                           "score_scale",
                                           "score_zero_point",
                                           "scaled_score_scale",
                                           "scaled_score_zero_point",
                                           "biased_score_scale",
                                           "biased_score_zero_point",
                                           "weight_scale",
                                           "weight_zero_point",
                                           "pad",
                                           "bias",
                                           "segment_q",
                                           "segment_k",
                                           "lengths",
                                           "unused"};
};

const OpDescription* QuantizedAttentionDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_
