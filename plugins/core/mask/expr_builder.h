// SPDX-License-Identifier: Apache-2.0
// Builds mask expressions node by node: for the parser, and for what derives one expression from another.
#ifndef STOF_PLUGINS_CORE_MASK_EXPR_BUILDER_H_
#define STOF_PLUGINS_CORE_MASK_EXPR_BUILDER_H_

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>

#include "plugins/core/mask/expr.h"

namespace stof {

// Whether an operator without an operand gives a condition, not an integer.
constexpr bool IsCondition(ExprOp op) { return op >= ExprOp::kLt && op <= ExprOp::kFalse; }

class ExprBuilder {
 public:
  // The index of a new node, or -1 where a child is -1 or the expression would exceed MaskExpr::kMaxNodes. The caller
  // answers for the children's types.
  int Add(ExprOp op, std::initializer_list<int> children = {}) {
    if (expr_.nodes_.size() >= static_cast<size_t>(MaskExpr::kMaxNodes)) return -1;
    ExprNode node;
    node.op = op;
    node.boolean = IsCondition(op);
    for (const int child : children) {
      if (child < 0) return -1;
      node.child[node.arity++] = child;
    }
    expr_.nodes_.push_back(node);
    return static_cast<int>(expr_.nodes_.size()) - 1;
  }
  int AddConstant(int64_t value) {
    const int node = Add(ExprOp::kConst);
    if (node >= 0) expr_.nodes_.back().value = value;
    return node;
  }
  // A look-up of an operand by 1 to 4 indices.
  int AddLookup(int operand, const int (&indices)[4], int count) {
    const int node = Add(ExprOp::kLookup);
    if (node < 0) return -1;
    ExprNode& added = expr_.nodes_.back();
    added.operand = operand;
    added.boolean = expr_.operands_[static_cast<size_t>(operand)]->boolean;
    added.arity = static_cast<uint8_t>(count);
    std::copy(indices, indices + 4, added.child);
    return node;
  }
  int AddOperand(std::shared_ptr<const ExprOperand> operand) {
    expr_.operands_.push_back(std::move(operand));
    return static_cast<int>(expr_.operands_.size()) - 1;
  }

  int size() const { return static_cast<int>(expr_.nodes_.size()); }
  ExprNode& node(int i) { return expr_.nodes_[static_cast<size_t>(i)]; }
  const ExprOperands& operands() const { return expr_.operands_; }

  // The expression of a condition; the builder is then empty.
  MaskExpr Build(int root) {
    expr_.root_ = root;
    return std::exchange(expr_, MaskExpr());
  }

 private:
  MaskExpr expr_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_EXPR_BUILDER_H_
