// SPDX-License-Identifier: Apache-2.0
// Types and shapes of StofAttention's query, key, value and outputs: binds inputs to the kernels' arguments, checks
// them against the attributes, and has the rules for the outputs, of known and of symbolic sizes.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_

#include <string>
#include <vector>

#include "plugins/core/ops/attention.h"

namespace stof {

// Shapes, types and strides of query, key and value. S and T of packed sequences are the lengths of their tensors.
Status BindQueryKeyValue(const AttentionAttributes& attributes, const Tensor* inputs, int input_count,
                         AttentionArgs* args);

// The outputs' shapes, for inputs of the ranks that their layouts have.
std::vector<DimRule> OutputRules(const AttentionAttributes& attributes);
std::vector<DimRule> LseRules(const AttentionAttributes& attributes);

// OpDescription::shape_rule.
std::vector<DimRule> AttentionOutputShape(const AttributeReader& attributes, const int* ranks, int rank_count,
                                          int index);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_
