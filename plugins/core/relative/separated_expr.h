// SPDX-License-Identifier: Apache-2.0
// An integer expression of a query and a key as a function of one difference.
#ifndef STOF_PLUGINS_CORE_RELATIVE_SEPARATED_EXPR_H_
#define STOF_PLUGINS_CORE_RELATIVE_SEPARATED_EXPR_H_

#include <cstdint>
#include <map>
#include <vector>

#include "plugins/core/mask/expr.h"

namespace stof {

// value(q, k) = F(A(k) - C(q)): q and k stand in sums A(k) - C(q) alone, which are equal up to a factor and a constant.
class SeparatedExpr {
 public:
  // False where the expression is no function of one difference. It reads no run-time operand, b and h.
  static bool Make(const MaskExpr& expr, SeparatedExpr* separated);

  bool is_distance() const;  // A is k and C is q
  // A of keys [0, T) and C of queries [P, P + S). MaskExpr::Check has passed for the sizes.
  void EvaluateParts(const ExprSizes& sizes, std::vector<int64_t>* key_part, std::vector<int64_t>* query_part) const;
  // F of the differences [low, low + count), which Check has covered: they are between those of the parts.
  void EvaluateRows(const ExprSizes& sizes, int64_t low, int64_t count, std::vector<int64_t>* rows) const;
  const MaskExpr& expr() const { return expr_; }

 private:
  using Terms = std::map<int32_t, int64_t>;  // nodes with their coefficients; equal nodes are one
  struct Sum {
    Terms key, query, mixed, constant;  // of k alone, of q alone, of both, of neither
  };
  // A sum that contains the difference, or another node of k or q alone: factor * difference + the other terms.
  struct Difference {
    int64_t factor = 0;
    Terms others;
  };

  void Number();
  bool AddTerms(int32_t node, int64_t factor, Sum* sum) const;
  bool Visit(int32_t node);
  bool AddDifference(int32_t node, const Sum& sum);
  std::vector<int32_t> NodesOf(const Terms& roots, bool by_difference) const;
  int64_t Lookup(const ExprNode& node, const std::vector<int64_t>& values) const;
  int64_t Evaluate(const ExprNode& node, const ExprSizes& sizes, int64_t q, int64_t k,
                   const std::vector<int64_t>& values) const;
  static uint64_t SumOf(const Terms& terms, const std::vector<int64_t>& values);
  const ExprNode& Node(int32_t i) const { return expr_.nodes()[static_cast<size_t>(i)]; }

  MaskExpr expr_;
  std::vector<uint8_t> reads_;                 // [nodes] kReadsQuery, kReadsKey
  std::vector<int32_t> same_;                  // [nodes] the first node that is equal
  std::map<int32_t, Difference> differences_;  // by node
  bool has_difference_ = false;
  Terms key_, query_;  // A, and -C
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_RELATIVE_SEPARATED_EXPR_H_
