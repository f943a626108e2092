// SPDX-License-Identifier: Apache-2.0
// Evaluates the rules by which an operator describes the shapes of its outputs.
#ifndef STOF_PLUGINS_CORE_CONTRACT_DIM_RULE_H_
#define STOF_PLUGINS_CORE_CONTRACT_DIM_RULE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "plugins/core/contract/op.h"

namespace stof {

// The size of a dimension; -1 where it is unknown or too large. dim_of(input, axis) is that of an input, -1 where
// unknown.
template <typename DimOf>
int64_t EvaluateRule(const DimRule& rule, DimOf dim_of) {
  if (rule.input < 0) return rule.value;
  int64_t size = dim_of(rule.input, rule.axis);
  if (size < 0 || __builtin_mul_overflow(size, rule.times, &size)) return -1;
  size /= rule.over;
  if (rule.by_input < 0) return size;
  const int64_t factor = dim_of(rule.by_input, rule.by_axis);
  return factor < 0 || __builtin_mul_overflow(size, factor, &size) ? -1 : size;
}
// A tensor without data, by rules for inputs of known shapes.
inline Tensor TensorByRules(DType dtype, const std::vector<DimRule>& rules, const Tensor* inputs) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.rank = static_cast<int32_t>(rules.size());
  for (size_t i = 0; i < rules.size(); ++i) {
    tensor.dims[i] = EvaluateRule(rules[i], [&](int input, int axis) { return inputs[input].dims[axis]; });
  }
  return tensor;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_DIM_RULE_H_
