// SPDX-License-Identifier: Apache-2.0
// Planning, intervals over boxes, signatures. Rows are in expr_rows.cc.
#include "plugins/core/mask/expr_eval.h"

#include <algorithm>
#include <limits>

#include "plugins/core/base/integers.h"

namespace stof {
namespace {

// Elements that one look-up interval may read. Larger boxes fall back to summaries; a tile of a table in [q, k] is
// better evaluated than scanned first.
constexpr int64_t kLargestScan = 256;

bool Fits32(Interval a) {
  return a.lo >= std::numeric_limits<int32_t>::min() && a.hi <= std::numeric_limits<int32_t>::max();
}

}  // namespace

ExprEvaluator::ExprEvaluator(const MaskExpr& expr, const ExprSizes& sizes, std::vector<ExprBinding> bindings)
    : expr_(expr), sizes_(sizes), bindings_(std::move(bindings)) {
  const size_t size = expr.nodes().size();
  intervals_.resize(size);
  value_.resize(size);
  affine_.assign(size, -1);
  lane_.assign(size, -1);
  FindAffine();
  PlanRows();
  if (sizes.B > 0 && sizes.H > 0 && sizes.S > 0 && sizes.T > 0) {
    Classify({0, sizes.B - 1, 0, sizes.H - 1, sizes.P, sizes.P + sizes.S - 1, 0, sizes.T - 1});
    narrow_ = std::all_of(plan_.begin(), plan_.end(), [this](int32_t i) {
      const Affine* affine = AffineOf(i);
      return Fits32(IntervalOf(i)) && (affine == nullptr || Fits32(AffineInterval(*affine, box_)));
    });
  }
  if (narrow_) {
    narrow_lanes_.resize(varying_.size() * static_cast<size_t>(kRun));
  } else {
    wide_lanes_.resize(varying_.size() * static_cast<size_t>(kRun));
  }
}

void ExprEvaluator::FindAffine() {
  for (size_t i = 0; i < expr_.nodes().size(); ++i) {
    const ExprNode& node = expr_.nodes()[i];
    const int arguments = node.op == ExprOp::kLookup ? 0 : node.arity;
    const Affine* left = arguments > 0 ? AffineOf(node.child[0]) : nullptr;
    const Affine* right = arguments > 1 ? AffineOf(node.child[1]) : nullptr;
    Affine affine;
    if (!CombineAffine(node, left, right, sizes_, &affine)) continue;
    affine_[i] = static_cast<int32_t>(affines_.size());
    affines_.push_back(affine);
  }
}

void ExprEvaluator::PlanRows() {
  const auto size = static_cast<int32_t>(expr_.nodes().size());
  if (size == 0) return;
  std::vector<char> needed(static_cast<size_t>(size), 0);
  needed[static_cast<size_t>(expr_.root())] = 1;
  for (int32_t i = size; i-- > 0;) {  // parents come after children
    if (needed[static_cast<size_t>(i)] == 0 || AffineOf(i) != nullptr) continue;
    const ExprNode& node = Node(i);
    for (int c = 0; c < node.arity; ++c) needed[static_cast<size_t>(node.child[c])] = 1;
  }
  for (int32_t i = 0; i < size; ++i) {
    if (needed[static_cast<size_t>(i)] == 0) continue;
    plan_.push_back(i);
    const ExprNode& node = Node(i);
    bool varies = false;
    if (const Affine* affine = AffineOf(i)) {
      varies = affine->k != 0;
    } else {
      for (int c = 0; c < node.arity; ++c) varies = varies || lane_[static_cast<size_t>(node.child[c])] >= 0;
    }
    if (varies) {
      lane_[static_cast<size_t>(i)] = static_cast<int32_t>(varying_.size());
      varying_.push_back(i);
    } else {
      uniform_.push_back(i);
    }
  }
}

Interval ExprEvaluator::LookupInterval(const ExprNode& node) const {
  const ExprOperand& operand = *expr_.operands()[static_cast<size_t>(node.operand)];
  const ExprBinding& binding = bindings_[static_cast<size_t>(node.operand)];
  const int64_t* dims = DimsOf(operand, binding);
  int64_t lo[4];
  int64_t hi[4];
  int64_t first = 0;  // flat indices of the box's corners
  int64_t last = 0;
  int64_t count = 1;
  for (int axis = 0; axis < node.arity; ++axis) {
    // Check proved the range for the whole problem; intervals of look-ups inside an index may be wider here.
    const Interval index = Broadcasts(expr_, node, axis, dims) ? Interval{0, 0} : IntervalOf(node.child[axis]);
    lo[axis] = std::clamp<int64_t>(index.lo, 0, dims[axis] - 1);
    hi[axis] = std::clamp<int64_t>(index.hi, 0, dims[axis] - 1);
    count *= hi[axis] - lo[axis] + 1;
    first = first * dims[axis] + lo[axis];
    last = last * dims[axis] + hi[axis];
  }
  Interval result = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  const auto take = [&result](int64_t low, int64_t high) {
    result.lo = std::min(result.lo, low);
    result.hi = std::max(result.hi, high);
  };
  const auto scan = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t value = ReadOperand(operand, binding, i);
      take(value, value);
    }
  };
  if (last - first + 1 == count) {  // one run of elements
    if (count <= kLargestScan) {
      scan(first, last + 1);
      return result;
    }
    if (operand.table) {  // whole blocks by their summaries
      constexpr int64_t kBlock = ExprOperand::kBlock;
      const int64_t head = CeilDiv(first, kBlock);
      const int64_t tail = (last + 1) / kBlock;
      scan(first, head * kBlock);
      for (int64_t block = head; block < tail; ++block) {
        take(operand.block_min[static_cast<size_t>(block)], operand.block_max[static_cast<size_t>(block)]);
      }
      scan(tail * kBlock, last + 1);
      return result;
    }
  }
  if (count > kLargestScan) {
    return operand.table ? Interval{operand.lo, operand.hi} : Interval{binding.lo, binding.hi};
  }
  int64_t index[4] = {lo[0], 0, 0, 0};
  std::copy(lo, lo + node.arity, index);
  for (;;) {
    int64_t flat = 0;
    for (int axis = 0; axis < node.arity; ++axis) flat = flat * dims[axis] + index[axis];
    scan(flat, flat + 1);
    int axis = node.arity - 1;
    while (axis >= 0 && ++index[axis] > hi[axis]) {
      index[axis] = lo[axis];
      --axis;
    }
    if (axis < 0) return result;
  }
}

Verdict ExprEvaluator::Classify(const ExprBox& box) {
  box_ = box;
  if (expr_.empty()) return Verdict::kAll;
  for (const int32_t i : plan_) {
    const ExprNode& node = Node(i);
    Interval& interval = intervals_[static_cast<size_t>(i)];
    if (const Affine* affine = AffineOf(i)) {
      interval = AffineInterval(*affine, box);
      if (node.boolean) interval = CompareInterval(node.op, interval, {0, 0});
      continue;
    }
    const Interval a = node.arity > 0 ? IntervalOf(node.child[0]) : Interval{};
    const Interval b = node.arity > 1 ? IntervalOf(node.child[1]) : Interval{};
    if (node.op == ExprOp::kLookup) {
      interval = LookupInterval(node);
    } else if (node.arity == 0) {
      interval = LeafInterval(node, box, sizes_);
    } else if (IsArithmetic(node.op)) {
      ArithmeticInterval(node.op, a, b, &interval);  // fits: see Check
    } else if (IsCompare(node.op)) {
      interval = CompareInterval(node.op, a, b);
    } else {
      interval = LogicInterval(node.op, a, b);
    }
  }
  const Interval root = IntervalOf(expr_.root());
  if (root.lo == 1) return Verdict::kAll;
  return root.hi == 0 ? Verdict::kNone : Verdict::kMixed;
}

void ExprEvaluator::Signature(std::vector<int64_t>* signature) const {
  signature->clear();
  if (!expr_.empty()) Sign(expr_.root(), signature);
}

// A decided part contributes its value; an affine one its value at the box's corner, under % d only modulo d. The order
// of visits follows from what was written before, so equal signatures come from equal visits.
void ExprEvaluator::Sign(int32_t i, std::vector<int64_t>* signature) const {
  const ExprNode& node = Node(i);
  const Interval interval = IntervalOf(i);
  const auto corner = [this](const Affine& affine) {
    const ExprBox at = {box_.b_lo, box_.b_lo, box_.h_lo, box_.h_lo, box_.q_lo, box_.q_lo, box_.k_lo, box_.k_lo};
    return AffineInterval(affine, at).lo;
  };
  if (interval.lo == interval.hi) {
    signature->push_back(0);
    signature->push_back(interval.lo);
    return;
  }
  signature->push_back(1);
  if (const Affine* affine = AffineOf(i)) {
    signature->push_back(corner(*affine));
    return;
  }
  if (node.op == ExprOp::kMod) {
    if (const Affine* affine = AffineOf(node.child[0])) {
      signature->push_back(FloorMod(corner(*affine), Node(node.child[1]).value));
      return;
    }
  }
  for (int c = 0; c < node.arity; ++c) Sign(node.child[c], signature);
}

}  // namespace stof
