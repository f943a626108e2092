// SPDX-License-Identifier: Apache-2.0
// Compares the two descriptions of an output's shape: OpDescription::shape_rule, from which runtimes plan, and
// Op::InferOutputs, which each run follows.
#ifndef STOF_TESTS_CPP_SHAPE_RULES_H_
#define STOF_TESTS_CPP_SHAPE_RULES_H_

#include <cstdint>
#include <vector>

#include "plugins/core/contract/dim_rule.h"
#include "tests/cpp/check.h"

namespace stof::test {

// output: of InferOutputs for these inputs. Dimensions that the rules leave open are not compared.
inline void CheckShapeRules(const OpDescription& description, const AttributeReader& attributes,
                            const std::vector<Tensor>& inputs, const Tensor& output, int index) {
  std::vector<int> ranks;
  for (const Tensor& input : inputs) ranks.push_back(input.rank);
  if (!description.is_variadic) ranks.resize(static_cast<size_t>(description.FirstInputs()));
  const std::vector<DimRule> rules =
      description.shape_rule(attributes, ranks.data(), static_cast<int>(ranks.size()), index);
  if (rules.empty()) return;
  CHECK(static_cast<int>(rules.size()) == output.rank, description.name, ": ", rules.size(), " dimensions");
  const Tensor expected = TensorByRules(output.dtype, rules, inputs.data());
  for (int i = 0; i < output.rank; ++i) {
    if (expected.dims[i] < 0) continue;
    CHECK(expected.dims[i] == output.dims[i], description.name, ": ", ShapeText(output), " by InferOutputs, ",
          ShapeText(expected), " by the rules");
  }
}

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_SHAPE_RULES_H_
