// SPDX-License-Identifier: Apache-2.0
// Types and shapes of StofAttention's query, key, value and outputs: binds inputs to the kernels' arguments, checks
// them against the attributes, and infers the outputs, by sizes or, where a model knows none, by rules over symbols.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_

#include <string>
#include <vector>

#include "plugins/core/ops/attention.h"

namespace stof {

// Shapes, types and strides of query, key and value.
Status BindQueryKeyValue(const AttentionAttributes& attributes, const Tensor* inputs, int input_count,
                         AttentionArgs* args);

// Types and shapes of the outputs.
void SetOutput(const AttentionArgs& args, TensorLayout layout, Tensor* output);
void SetLse(const AttentionArgs& args, Tensor* lse);
Status CheckOutput(const char* name, const Tensor& found, const Tensor& expected);

// OpDescription::shape_rule.
std::vector<DimRule> AttentionOutputShape(const AttributeReader& attributes, const int* ranks, int rank_count,
                                          int index);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_SHAPES_H_
