// SPDX-License-Identifier: Apache-2.0
// Copies the nodes of one mask expression into another that is being built.
#ifndef STOF_PLUGINS_CORE_MASK_COLUMNS_EXPR_REWRITE_H_
#define STOF_PLUGINS_CORE_MASK_COLUMNS_EXPR_REWRITE_H_

#include <vector>

#include "plugins/core/mask/expr_builder.h"

namespace stof {

// Adds one node, whose children are in `to` already, and returns its index. `to` has the operands of the source, in
// their order.
inline int CopyNode(const ExprNode& node, ExprBuilder* to) {
  if (node.op == ExprOp::kConst) return to->AddConstant(node.value);
  if (node.op == ExprOp::kLookup) return to->AddLookup(node.operand, node.child, node.arity);
  switch (node.arity) {
    case 0:
      return to->Add(node.op);
    case 1:
      return to->Add(node.op, {node.child[0]});
    default:
      return to->Add(node.op, {node.child[0], node.child[1]});
  }
}

// Copies the nodes of an expression, each by `copy(node, to)`, and returns their new indices. node.child holds those of
// the children.
template <typename Copy>
std::vector<int> CopyNodes(const MaskExpr& expr, ExprBuilder* to, Copy copy) {
  std::vector<int> placed(expr.nodes().size(), -1);
  for (size_t i = 0; i < placed.size(); ++i) {
    ExprNode node = expr.nodes()[i];
    bool is_complete = true;
    for (int c = 0; c < node.arity; ++c) {
      node.child[c] = placed[static_cast<size_t>(node.child[c])];
      is_complete = is_complete && node.child[c] >= 0;
    }
    if (is_complete) placed[i] = copy(node, to);
  }
  return placed;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_COLUMNS_EXPR_REWRITE_H_
