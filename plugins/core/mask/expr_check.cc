// SPDX-License-Identifier: Apache-2.0
// Proves that an expression can be evaluated for given sizes and operands.
#include <algorithm>

#include "plugins/core/mask/interval.h"

namespace stof {
namespace {

Status Measure(const ExprOperand& operand, ExprBinding* binding) {
  if (binding->data == nullptr || binding->rank != operand.rank) {
    return Status::Error("the mask reads " + operand.name + ", which is missing or not of rank " +
                         std::to_string(operand.rank));
  }
  int64_t count = 1;
  for (int axis = 0; axis < binding->rank; ++axis) count *= binding->dims[axis];
  if (count < 1) return Status::Error(operand.name + " has no elements");
  if (operand.boolean) {
    binding->lo = 0;
    binding->hi = 1;
    return Status();
  }
  binding->lo = binding->hi = ReadBinding(*binding, 0);
  for (int64_t i = 1; i < count; ++i) {
    const int64_t value = ReadBinding(*binding, i);
    binding->lo = std::min(binding->lo, value);
    binding->hi = std::max(binding->hi, value);
  }
  return Status();
}

}  // namespace

Status MaskExpr::CheckWork(const ExprSizes& sizes) const {
  const auto nodes = static_cast<int64_t>(nodes_.size());
  if (nodes > kMaxAnyNodes && sizes.S > 0 && sizes.T > kMaxWork / nodes / sizes.S) {
    return Status::Error("a mask expression of " + std::to_string(nodes) + " nodes for " + std::to_string(sizes.S) +
                         " queries and " + std::to_string(sizes.T) + " keys, expected at most " +
                         std::to_string(kMaxAnyNodes) + " nodes, or 2^38 nodes for all pairs together");
  }
  return Status();
}

Status MaskExpr::Check(const ExprSizes& sizes, std::vector<ExprBinding>* bindings) const {
  for (const int64_t size : {sizes.B, sizes.H, sizes.S, sizes.T, sizes.P}) {
    if (size < 0 || size > kMaxSize) {
      return Status::Error("a size of " + std::to_string(size) + ", expected 0 to 2^22");
    }
  }
  STOF_RETURN_IF_ERROR(CheckWork(sizes));
  if (bindings->size() != operands_.size()) return Status::Error("operands and bindings differ in number");
  if (empty() || sizes.B == 0 || sizes.H == 0 || sizes.S == 0 || sizes.T == 0) return Status();
  for (size_t i = 0; i < operands_.size(); ++i) {
    if (!operands_[i]->table) STOF_RETURN_IF_ERROR(Measure(*operands_[i], &(*bindings)[i]));
  }

  const ExprBox box = {0, sizes.B - 1, 0, sizes.H - 1, sizes.P, sizes.P + sizes.S - 1, 0, sizes.T - 1};
  std::vector<Interval> intervals(nodes_.size());
  const auto child = [&](const ExprNode& node, int c) {
    return c < node.arity ? intervals[static_cast<size_t>(node.child[c])] : Interval{};
  };
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const ExprNode& node = nodes_[i];
    bool fits = true;
    if (node.op == ExprOp::kLookup) {
      const ExprOperand& operand = *operands_[static_cast<size_t>(node.operand)];
      const ExprBinding& binding = (*bindings)[static_cast<size_t>(node.operand)];
      const int64_t* dims = DimsOf(operand, binding);
      for (int axis = 0; axis < node.arity; ++axis) {
        const Interval index = child(node, axis);
        if (Broadcasts(*this, node, axis, dims) || (index.lo >= 0 && index.hi < dims[axis])) continue;
        return Status::Error("index " + std::to_string(axis) + " of " + operand.name + " runs from " +
                             std::to_string(index.lo) + " to " + std::to_string(index.hi) + ", expected 0 to " +
                             std::to_string(dims[axis] - 1));
      }
      intervals[i] = operand.table ? Interval{operand.lo, operand.hi} : Interval{binding.lo, binding.hi};
      fits = intervals[i].lo >= -kLargestInteger && intervals[i].hi <= kLargestInteger;
    } else if (node.arity == 0) {
      intervals[i] = LeafInterval(node, box, sizes);
    } else if (IsArithmetic(node.op)) {
      fits = ArithmeticInterval(node.op, child(node, 0), child(node, 1), &intervals[i]);
    } else {
      intervals[i] = {0, 1};
    }
    if (!fits) return Status::Error("the mask expression leaves ±2^61 for these sizes and operands");
  }
  return Status();
}

}  // namespace stof
