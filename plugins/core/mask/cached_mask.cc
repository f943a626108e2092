// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/cached_mask.h"

#include <algorithm>
#include <cstring>

#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr_affine.h"
#include "plugins/core/mask/expr_builder.h"

namespace stof {
namespace {

// Copies the nodes of an expression, each by `copy(node, to)`, which has the children's new indices in node.child.
template <typename Copy>
std::vector<int> CopyNodes(const MaskExpr& expr, ExprBuilder* to, Copy copy) {
  std::vector<int> placed(expr.nodes().size(), -1);
  for (size_t i = 0; i < placed.size(); ++i) {
    ExprNode node = expr.nodes()[i];
    for (int c = 0; c < node.arity; ++c) node.child[c] = placed[static_cast<size_t>(node.child[c])];
    placed[i] = copy(node, to);
  }
  return placed;
}

int CopyNode(const ExprNode& node, ExprBuilder* to) {
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

bool IsCausal(const MaskExpr& expr, int conjunct) {
  const ExprNode& node = expr.nodes()[static_cast<size_t>(conjunct)];
  if (node.op != ExprOp::kLe) return false;
  return expr.nodes()[static_cast<size_t>(node.child[0])].op == ExprOp::kK &&
         expr.nodes()[static_cast<size_t>(node.child[1])].op == ExprOp::kQ;
}

Status TooLong() { return Status::Error("the mask has more than 4096 nodes"); }

// expr and k <= q.
Status AddCausal(const MaskExpr& expr, MaskExpr* causal) {
  const std::vector<int> conjuncts = expr.Conjuncts();
  if (!expr.empty() &&
      std::any_of(conjuncts.begin(), conjuncts.end(), [&](int conjunct) { return IsCausal(expr, conjunct); })) {
    *causal = expr;
    return Status();
  }
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  int root = -1;
  if (!expr.empty()) root = CopyNodes(expr, &builder, CopyNode)[static_cast<size_t>(expr.root())];
  const int key = builder.Add(ExprOp::kK);
  const int condition = builder.Add(ExprOp::kLe, {key, builder.Add(ExprOp::kQ)});
  root = expr.empty() ? condition : builder.Add(ExprOp::kAnd, {root, condition});
  if (root < 0) return TooLong();
  *causal = builder.Build(root);
  return Status();
}

// The expression for queries that count from 0, with their first positions as a run-time operand.
Status MoveQueries(const MaskExpr& expr, MaskExpr* moved) {
  ExprBuilder builder;
  for (const auto& operand : expr.operands()) builder.AddOperand(operand);
  auto first = std::make_shared<ExprOperand>();
  first->name = kFirstPositions;
  first->rank = 1;
  first->hash = HashBytes(kFirstPositions, std::strlen(kFirstPositions), 0);
  const int operand = builder.AddOperand(std::move(first));
  const auto position = [operand](ExprBuilder* to) {
    const int indices[4] = {to->Add(ExprOp::kB), -1, -1, -1};
    return indices[0] < 0 ? -1 : to->AddLookup(operand, indices, 1);
  };
  const std::vector<int> placed = CopyNodes(expr, &builder, [&position](const ExprNode& node, ExprBuilder* to) {
    if (node.op == ExprOp::kP) return position(to);
    if (node.op == ExprOp::kQ) {
      const int at = position(to);
      return to->Add(ExprOp::kAdd, {at, to->Add(ExprOp::kQ)});
    }
    return CopyNode(node, to);
  });
  const int root = placed[static_cast<size_t>(expr.root())];
  if (root < 0) return TooLong();
  *moved = builder.Build(root);
  return Status();
}

}  // namespace

Status MakeCachedMask(const std::string& text, const Tables& tables, CachedMask* mask) {
  MaskExpr given, moved;
  STOF_RETURN_IF_ERROR(MaskExpr::Parse(text, tables, &given));
  if (given.Uses(ExprOp::kT)) {
    return Status::Error("the mask reads T, expected positions and P: sequences have different numbers of keys");
  }
  if (given.UsesRuntime()) {
    return Status::Error("the mask reads a run-time operand, expected positions and tables");
  }
  STOF_RETURN_IF_ERROR(AddCausal(given, &mask->expr));
  STOF_RETURN_IF_ERROR(MoveQueries(mask->expr, &moved));
  mask->on_device = MakeAttentionMask(moved);
  return Status();
}

bool IsOfDistances(const MaskExpr& expr) {
  // A node is moved by a shift of all positions unless its affine form, or each of its arguments, stays the same.
  const std::vector<ExprNode>& nodes = expr.nodes();
  const ExprSizes any = {1, 1, 1, 1, 0};
  std::vector<Affine> forms(nodes.size());
  std::vector<uint8_t> is_affine(nodes.size(), 0), reads_sizes(nodes.size(), 0), stays(nodes.size(), 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    const ExprNode& node = nodes[i];
    const Affine* arguments[2] = {nullptr, nullptr};
    bool all_stay = true;
    reads_sizes[i] = node.op == ExprOp::kP || node.op == ExprOp::kT ? 1 : 0;
    for (int c = 0; c < node.arity; ++c) {
      const auto child = static_cast<size_t>(node.child[c]);
      if (c < 2 && is_affine[child] != 0) arguments[c] = &forms[child];
      all_stay = all_stay && stays[child] != 0;
      reads_sizes[i] |= reads_sizes[child];
    }
    is_affine[i] = CombineAffine(node, arguments[0], arguments[1], any, &forms[i]) ? 1 : 0;
    stays[i] = reads_sizes[i] == 0 && (is_affine[i] != 0 ? forms[i].q + forms[i].k == 0 : all_stay) ? 1 : 0;
  }
  return expr.empty() || stays[static_cast<size_t>(expr.root())] != 0;
}

Status BoundCachedMask::Make(const MaskExpr& expr, const ExprSizes& sizes, const int32_t* first,
                             std::unique_ptr<BoundCachedMask>* bound) {
  std::unique_ptr<BoundCachedMask> made(new BoundCachedMask(sizes, expr.Uses(ExprOp::kH)));
  for (int64_t b = 0; b < sizes.B; ++b) {
    ExprSizes own = sizes;
    own.P = first[b];
    own.T = first[b] + sizes.S;
    made->keys_.push_back(own.T);
    made->sequence_.emplace_back();
    STOF_RETURN_IF_ERROR(BoundDynamicMask::Make(expr, own, {}, &made->sequence_.back()));
  }
  *bound = std::move(made);
  return Status();
}

Status BoundCachedMask::status() const {
  for (const auto& sequence : sequence_) STOF_RETURN_IF_ERROR(sequence->status());
  return Status();
}

int BoundCachedMask::Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n,
                          uint32_t* bits) {
  const auto& bound = *static_cast<const BoundCachedMask*>(self);
  const auto at = static_cast<size_t>(b);
  if (key0 >= bound.keys_[at] || row0 >= bound.sizes_.S) return 0;
  const DynamicMask* mask = bound.sequence_[at]->view();
  return mask->tile(mask->self, b, h, row0, key0, m, n, bits);
}

}  // namespace stof
