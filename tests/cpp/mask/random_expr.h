// SPDX-License-Identifier: Apache-2.0
// Random mask expressions with operands that fit them, and an evaluator that shares no code with the product's.
#ifndef STOF_TESTS_CPP_MASK_RANDOM_EXPR_H_
#define STOF_TESTS_CPP_MASK_RANDOM_EXPR_H_

#include <string>
#include <utility>
#include <vector>

#include "plugins/core/mask/expr.h"
#include "tests/cpp/check.h"

namespace stof::test {

// Owns what its tensors point to.
struct Operands {
  std::vector<std::vector<int64_t>> integers;
  std::vector<std::vector<uint8_t>> bytes;
  std::vector<std::pair<std::string, Tensor>> tables;
  std::vector<std::pair<std::string, Tensor>> runtime;
};

struct RandomMask {
  std::string text;
  ExprSizes sizes;
  Operands operands;
  MaskExpr expr;
  std::vector<ExprBinding> bindings;
};

ExprSizes RandomSizes(Random* random, int64_t most);
// An expression that parses and whose Check passes for its sizes.
RandomMask MakeRandomMask(Random* random, const ExprSizes& sizes, bool runtime_operands);
// Bindings of an expression's run-time operands by name.
std::vector<ExprBinding> Bind(const MaskExpr& expr, const std::vector<std::pair<std::string, Tensor>>& runtime);

// The value of one pair, by plain recursion.
bool Allowed(const MaskExpr& expr, const ExprSizes& sizes, const std::vector<ExprBinding>& bindings, int64_t b,
             int64_t h, int64_t q, int64_t k);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_MASK_RANDOM_EXPR_H_
