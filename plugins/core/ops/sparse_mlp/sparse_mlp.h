// SPDX-License-Identifier: Apache-2.0
// StofSparseMLP: docs/reference/sparse-mlp.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_SPARSE_MLP_SPARSE_MLP_H_
#define STOF_PLUGINS_CORE_OPS_SPARSE_MLP_SPARSE_MLP_H_

#include <cstdint>

#include "plugins/core/contract/op.h"
#include "plugins/core/contract/sparse_mlp.h"

namespace stof {

// The inputs by index.
namespace sparse_mlp_input {
constexpr int kInput = 0, kGate = 1, kGateWeight = 2, kUpWeight = 3, kDownWeight = 4, kGateBias = 5, kUpBias = 6,
              kDownBias = 7, kThreshold = 8, kPredictorDown = 9, kPredictorUp = 10, kGateScales = 11,
              kGateZeroPoints = 12, kUpScales = 13, kUpZeroPoints = 14, kDownScales = 15, kDownZeroPoints = 16,
              kPredictorDownScales = 17, kPredictorUpScales = 18, kCount = 19;
constexpr const char* kNames[kCount] = {"input",
                                        "gate",
                                        "gate_weight",
                                        "up_weight",
                                        "down_weight",
                                        "gate_bias",
                                        "up_bias",
                                        "down_bias",
                                        "threshold",
                                        "predictor_down",
                                        "predictor_up",
                                        "gate_scales",
                                        "gate_zero_points",
                                        "up_scales",
                                        "up_zero_points",
                                        "down_scales",
                                        "down_zero_points",
                                        "predictor_down_scales",
                                        "predictor_up_scales"};
}  // namespace sparse_mlp_input

struct SparseMlpAttributes {
  Activation activation = Activation::kNone;
  SparseMlpSelection selection = SparseMlpSelection::kNonzero;
  int64_t bits = 0;  // 0: the weights are not quantized
  int64_t block_size = 0;
  int64_t accuracy_level = 0;
  int64_t hot_neurons = 0;  // the first neurons, which were active; 0: not known
  bool has_predictor_relu = false;
  // The CPU: constant fp32 weights may be rounded to bf16. Where they are, blocks of many tokens may be multiplied in
  // bf16: tokens and hidden values are rounded, too.
  bool allow_bf16 = false;
};
Status ParseSparseMlp(const AttributeReader& attributes, SparseMlpAttributes* parsed);

const OpDescription* SparseMlpDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_SPARSE_MLP_SPARSE_MLP_H_
