// SPDX-License-Identifier: Apache-2.0
// Evaluation of mask expressions, by interval over boxes of pairs and element by element along keys.
#include <algorithm>
#include <limits>

#include "plugins/core/expr.h"

namespace stof {
namespace {

// Every integer of a legal expression stays within ±2^61, so that the difference of any two fits 64 bits.
constexpr int64_t kLargest = int64_t{1} << 61;
constexpr int64_t kLargestScan = 4096;  // elements of a table that one look-up interval may read

int64_t FloorDiv(int64_t a, int64_t d) {
  const int64_t quotient = a / d;
  return (a % d != 0 && ((a < 0) != (d < 0))) ? quotient - 1 : quotient;
}
int64_t FloorMod(int64_t a, int64_t d) { return a - d * FloorDiv(a, d); }

int64_t ReadBinding(const ExprBinding& binding, int64_t i) {
  switch (binding.dtype) {
    case DType::kI64:
      return static_cast<const int64_t*>(binding.data)[i];
    case DType::kI32:
      return static_cast<const int32_t*>(binding.data)[i];
    default:
      return static_cast<const uint8_t*>(binding.data)[i];
  }
}

Interval DivInterval(Interval a, int64_t d) {
  const int64_t x = FloorDiv(a.lo, d);
  const int64_t y = FloorDiv(a.hi, d);
  return {std::min(x, y), std::max(x, y)};
}

Interval ModInterval(Interval a, int64_t d) {
  if (FloorDiv(a.lo, d) == FloorDiv(a.hi, d)) return {FloorMod(a.lo, d), FloorMod(a.hi, d)};
  return d > 0 ? Interval{0, d - 1} : Interval{d + 1, 0};
}

Interval AbsInterval(Interval a) {
  if (a.lo >= 0) return a;
  if (a.hi <= 0) return {-a.hi, -a.lo};
  return {0, std::max(-a.lo, a.hi)};
}

// Comparison of a value in `a` with 0, as a boolean interval.
Interval CompareZero(ExprOp op, Interval a) {
  switch (op) {
    case ExprOp::kLt:
      return {a.hi < 0, a.lo < 0};
    case ExprOp::kLe:
      return {a.hi <= 0, a.lo <= 0};
    case ExprOp::kGt:
      return {a.lo > 0, a.hi > 0};
    case ExprOp::kGe:
      return {a.lo >= 0, a.hi >= 0};
    case ExprOp::kEq:
      return {a.lo == 0 && a.hi == 0, a.lo <= 0 && a.hi >= 0};
    default:
      return {a.lo > 0 || a.hi < 0, !(a.lo == 0 && a.hi == 0)};
  }
}

// The corners of a * b; false on overflow.
bool MulInterval(Interval a, Interval b, Interval* result) {
  const int64_t xs[2] = {a.lo, a.hi};
  const int64_t ys[2] = {b.lo, b.hi};
  int64_t low = std::numeric_limits<int64_t>::max();
  int64_t high = std::numeric_limits<int64_t>::min();
  for (int64_t x : xs) {
    for (int64_t y : ys) {
      int64_t product = 0;
      if (__builtin_mul_overflow(x, y, &product)) return false;
      low = std::min(low, product);
      high = std::max(high, product);
    }
  }
  *result = {low, high};
  return true;
}

bool Arithmetic(const ExprNode& node, Interval a, Interval b, Interval* r) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  switch (node.op) {
    case ExprOp::kAdd:
      return !__builtin_add_overflow(a.lo, b.lo, &r->lo) && !__builtin_add_overflow(a.hi, b.hi, &r->hi);
    case ExprOp::kSub:
      return !__builtin_sub_overflow(a.lo, b.hi, &r->lo) && !__builtin_sub_overflow(a.hi, b.lo, &r->hi);
    case ExprOp::kMul:
      return MulInterval(a, b, r);
    case ExprOp::kDiv:
      if (a.lo == kMin && b.lo == -1) return false;
      *r = DivInterval(a, b.lo);
      return true;
    case ExprOp::kMod:
      if (a.lo == kMin && b.lo == -1) return false;
      *r = ModInterval(a, b.lo);
      return true;
    case ExprOp::kNeg:
      if (a.lo == kMin) return false;
      *r = {-a.hi, -a.lo};
      return true;
    case ExprOp::kAbs:
      if (a.lo == kMin) return false;
      *r = AbsInterval(a);
      return true;
    case ExprOp::kMin:
      *r = {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
      return true;
    case ExprOp::kMax:
      *r = {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
      return true;
    default:
      return false;
  }
}

bool IsArithmetic(ExprOp op) { return op >= ExprOp::kAdd && op <= ExprOp::kMax; }
bool IsCompare(ExprOp op) { return op >= ExprOp::kLt && op <= ExprOp::kNe; }

Interval Leaf(const ExprNode& node, const ExprBox& box, const ExprSizes& sizes) {
  switch (node.op) {
    case ExprOp::kConst:
      return {node.value, node.value};
    case ExprOp::kB:
      return {box.b_lo, box.b_hi};
    case ExprOp::kH:
      return {box.h_lo, box.h_hi};
    case ExprOp::kQ:
      return {box.q_lo, box.q_hi};
    case ExprOp::kK:
      return {box.k_lo, box.k_hi};
    case ExprOp::kS:
      return {sizes.S, sizes.S};
    case ExprOp::kT:
      return {sizes.T, sizes.T};
    case ExprOp::kP:
      return {sizes.P, sizes.P};
    case ExprOp::kTrue:
      return {1, 1};
    default:
      return {0, 0};
  }
}

// A batch or head index into an axis of size 1 reads element 0: one vector serves all batches.
bool Broadcasts(const std::vector<ExprNode>& nodes, const ExprNode& node, int axis, const int64_t* dims) {
  const ExprOp op = nodes[node.child[axis]].op;
  return dims[axis] == 1 && (op == ExprOp::kB || op == ExprOp::kH);
}

const int64_t* DimsOf(const ExprOperand& operand, const ExprBinding& binding) {
  return operand.table ? operand.dims : binding.dims;
}

Status Overflow() { return Status::Error("the mask expression leaves ±2^61 for these sizes"); }

}  // namespace

Status MaskExpr::Check(const ExprSizes& sizes, const std::vector<ExprBinding>& bindings) const {
  const int64_t all[] = {sizes.B, sizes.H, sizes.S, sizes.T, sizes.P};
  for (int64_t size : all) {
    if (size < 0 || size > kMaxSize) {
      return Status::Error("a size of " + std::to_string(size) + ", expected 0 to 2^22");
    }
  }
  if (empty() || sizes.B == 0 || sizes.H == 0 || sizes.S == 0 || sizes.T == 0) return Status();
  if (bindings.size() != operands_.size()) return Status::Error("operands and bindings differ in number");
  const ExprBox box = {0, sizes.B - 1, 0, sizes.H - 1, sizes.P, sizes.P + sizes.S - 1, 0, sizes.T - 1};
  std::vector<Interval> intervals(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const ExprNode& node = nodes_[i];
    if (node.arity == 0) {
      intervals[i] = Leaf(node, box, sizes);
    } else if (IsArithmetic(node.op)) {
      const Interval b = node.arity > 1 ? intervals[node.child[1]] : Interval{};
      if (!Arithmetic(node, intervals[node.child[0]], b, &intervals[i])) return Overflow();
    } else if (node.op == ExprOp::kLookup) {
      const ExprOperand& operand = operands_[node.operand];
      const ExprBinding& binding = bindings[node.operand];
      if (!operand.table && (binding.data == nullptr || binding.rank != operand.rank)) {
        return Status::Error(operand.name + " is missing or has a wrong rank");
      }
      const int64_t* dims = DimsOf(operand, binding);
      for (int axis = 0; axis < node.arity; ++axis) {
        const Interval index = intervals[node.child[axis]];
        if (Broadcasts(nodes_, node, axis, dims)) continue;
        if (index.lo < 0 || index.hi >= dims[axis]) {
          return Status::Error("index " + std::to_string(axis) + " of " + operand.name + " runs from " +
                               std::to_string(index.lo) + " to " + std::to_string(index.hi) + ", expected 0 to " +
                               std::to_string(dims[axis] - 1));
        }
      }
      intervals[i] = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()};
      if (node.boolean) intervals[i] = {0, 1};
      if (!node.boolean && operand.table) {
        intervals[i] = {*std::min_element(operand.block_min.begin(), operand.block_min.end()),
                        *std::max_element(operand.block_max.begin(), operand.block_max.end())};
      }
      if (!node.boolean && !operand.table && binding.dtype == DType::kI64) {
        // Values of a run-time vector are read for the proof: ids of 64 bits are legal, sums of them may not be.
        int64_t count = 1;
        for (int axis = 0; axis < binding.rank; ++axis) count *= binding.dims[axis];
        intervals[i] = {ReadBinding(binding, 0), ReadBinding(binding, 0)};
        for (int64_t j = 1; j < count; ++j) {
          intervals[i].lo = std::min(intervals[i].lo, ReadBinding(binding, j));
          intervals[i].hi = std::max(intervals[i].hi, ReadBinding(binding, j));
        }
      }
    } else {
      intervals[i] = {0, 1};
    }
    if (intervals[i].lo < -kLargest || intervals[i].hi > kLargest) return Overflow();
  }
  return Status();
}

ExprEvaluator::ExprEvaluator(const MaskExpr& expr, const ExprSizes& sizes, std::vector<ExprBinding> bindings)
    : expr_(expr), sizes_(sizes), bindings_(std::move(bindings)) {
  const auto& nodes = expr.nodes();
  intervals_.resize(nodes.size());
  uniform_.resize(nodes.size());
  affine_.assign(nodes.size(), -1);
  lane_.assign(nodes.size(), -1);
  int32_t lanes = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const ExprNode& node = nodes[i];
    bool varying = node.op == ExprOp::kK;
    for (int c = 0; c < node.arity; ++c) varying = varying || lane_[node.child[c]] >= 0;
    if (varying) lane_[i] = lanes++;

    Affine affine;
    bool exact = true;
    const auto of = [&](int c) { return affine_[node.child[c]] < 0 ? nullptr : &affines_[affine_[node.child[c]]]; };
    const auto combine = [&](const Affine& x, int64_t scale, Affine* sum) {
      const int64_t from[] = {x.b, x.h, x.q, x.k, x.constant};
      int64_t* to[] = {&sum->b, &sum->h, &sum->q, &sum->k, &sum->constant};
      for (int j = 0; j < 5; ++j) {
        int64_t product = 0;
        if (__builtin_mul_overflow(from[j], scale, &product) || __builtin_add_overflow(*to[j], product, to[j])) {
          exact = false;
        }
      }
    };
    const auto constant = [](const Affine* x) { return x->b == 0 && x->h == 0 && x->q == 0 && x->k == 0; };
    switch (node.op) {
      case ExprOp::kConst:
        affine.constant = node.value;
        break;
      case ExprOp::kB:
        affine.b = 1;
        break;
      case ExprOp::kH:
        affine.h = 1;
        break;
      case ExprOp::kQ:
        affine.q = 1;
        break;
      case ExprOp::kK:
        affine.k = 1;
        break;
      case ExprOp::kS:
        affine.constant = sizes.S;
        break;
      case ExprOp::kT:
        affine.constant = sizes.T;
        break;
      case ExprOp::kP:
        affine.constant = sizes.P;
        break;
      case ExprOp::kAdd:
      case ExprOp::kSub:
        exact = of(0) != nullptr && of(1) != nullptr;
        if (exact) combine(*of(0), 1, &affine);
        if (exact) combine(*of(1), node.op == ExprOp::kAdd ? 1 : -1, &affine);
        break;
      case ExprOp::kNeg:
        exact = of(0) != nullptr;
        if (exact) combine(*of(0), -1, &affine);
        break;
      case ExprOp::kMul:
        exact = of(0) != nullptr && of(1) != nullptr && (constant(of(0)) || constant(of(1)));
        if (exact && constant(of(0))) {
          combine(*of(1), of(0)->constant, &affine);
        } else if (exact) {
          combine(*of(0), of(1)->constant, &affine);
        }
        break;
      default:
        exact = false;
    }
    if (exact) {
      affine_[i] = static_cast<int32_t>(affines_.size());
      affines_.push_back(affine);
    }
  }
  lanes_.resize(static_cast<size_t>(lanes) * kRun);
}

Interval ExprEvaluator::LookupInterval(const ExprNode& node) const {
  const ExprOperand& operand = expr_.operands()[node.operand];
  const ExprBinding& binding = bindings_[node.operand];
  const int64_t* dims = DimsOf(operand, binding);
  int64_t lo[4];
  int64_t hi[4];
  int64_t count = 1;
  for (int axis = 0; axis < node.arity; ++axis) {
    const bool first = Broadcasts(expr_.nodes(), node, axis, dims);
    lo[axis] = first ? 0 : std::max<int64_t>(0, intervals_[node.child[axis]].lo);
    hi[axis] = first ? 0 : std::min(dims[axis] - 1, intervals_[node.child[axis]].hi);
    count *= hi[axis] - lo[axis] + 1;
  }
  Interval result = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  const auto take = [&result](int64_t low, int64_t high) {
    result.lo = std::min(result.lo, low);
    result.hi = std::max(result.hi, high);
  };
  if (operand.table && (node.arity == 1 || count > kLargestScan)) {
    // Whole blocks by their summaries; several axes fall back to all blocks between the first and last element.
    int64_t first = 0;
    int64_t last = 0;
    for (int axis = 0; axis < node.arity; ++axis) {
      first = first * dims[axis] + lo[axis];
      last = last * dims[axis] + hi[axis];
    }
    if (last - first < 2 * ExprOperand::kBlock) {
      for (int64_t i = first; i <= last; ++i) take(operand.At(i), operand.At(i));
      return result;
    }
    const int64_t head = (first + ExprOperand::kBlock - 1) / ExprOperand::kBlock;
    const int64_t tail = (last + 1) / ExprOperand::kBlock;
    for (int64_t i = first; i < head * ExprOperand::kBlock; ++i) take(operand.At(i), operand.At(i));
    for (int64_t block = head; block < tail; ++block) take(operand.block_min[block], operand.block_max[block]);
    for (int64_t i = tail * ExprOperand::kBlock; i <= last; ++i) take(operand.At(i), operand.At(i));
    return result;
  }
  if (count > kLargestScan) {
    return node.boolean ? Interval{0, 1} : Interval{-kLargest, kLargest};
  }
  int64_t index[4] = {lo[0], lo[1], lo[2], lo[3]};
  for (;;) {
    int64_t flat = 0;
    for (int axis = 0; axis < node.arity; ++axis) flat = flat * dims[axis] + index[axis];
    const int64_t value = operand.table ? operand.At(flat) : ReadBinding(binding, flat);
    take(node.boolean ? value != 0 : value, node.boolean ? value != 0 : value);
    int axis = node.arity - 1;
    while (axis >= 0 && ++index[axis] > hi[axis]) {
      index[axis] = lo[axis];
      --axis;
    }
    if (axis < 0) return result;
  }
}

Interval ExprEvaluator::IntervalOf(const ExprNode& node, const ExprBox& box) const {
  if (node.arity == 0) return Leaf(node, box, sizes_);
  const Interval a = intervals_[node.child[0]];
  const Interval b = node.arity > 1 ? intervals_[node.child[1]] : Interval{};
  if (node.op == ExprOp::kAnd) return {a.lo & b.lo, a.hi & b.hi};
  if (node.op == ExprOp::kOr) return {a.lo | b.lo, a.hi | b.hi};
  if (node.op == ExprOp::kNot) return {1 - a.hi, 1 - a.lo};
  if (node.op == ExprOp::kLookup) return LookupInterval(node);
  Interval result;
  if (IsArithmetic(node.op)) {
    // Check proved that nothing leaves ±2^61 on the whole problem, of which the box is a part; only look-ups too wide
    // to scan give a wider interval than the truth.
    if (Arithmetic(node, a, b, &result)) return {std::max(result.lo, -kLargest), std::min(result.hi, kLargest)};
    return {-kLargest, kLargest};
  }
  ExprNode difference;
  difference.op = ExprOp::kSub;
  if (!Arithmetic(difference, a, b, &result)) return {0, 1};
  return CompareZero(node.op, result);
}

bool ExprEvaluator::Subtract(const Affine& x, const Affine& y, Affine* difference) {
  return !__builtin_sub_overflow(x.b, y.b, &difference->b) && !__builtin_sub_overflow(x.h, y.h, &difference->h) &&
         !__builtin_sub_overflow(x.q, y.q, &difference->q) && !__builtin_sub_overflow(x.k, y.k, &difference->k) &&
         !__builtin_sub_overflow(x.constant, y.constant, &difference->constant);
}

Verdict ExprEvaluator::Classify(const ExprBox& box) {
  const auto& nodes = expr_.nodes();
  // Partial sums may wrap, the sum itself fits: hence unsigned.
  const auto span = [&box](const Affine& x) {
    using U = uint64_t;
    const Interval ranges[] = {{box.b_lo, box.b_hi}, {box.h_lo, box.h_hi}, {box.q_lo, box.q_hi}, {box.k_lo, box.k_hi}};
    const int64_t factors[] = {x.b, x.h, x.q, x.k};
    U lo = static_cast<U>(x.constant);
    U hi = lo;
    for (int i = 0; i < 4; ++i) {
      const U factor = static_cast<U>(factors[i]);
      lo += factor * static_cast<U>(factors[i] >= 0 ? ranges[i].lo : ranges[i].hi);
      hi += factor * static_cast<U>(factors[i] >= 0 ? ranges[i].hi : ranges[i].lo);
    }
    return Interval{static_cast<int64_t>(lo), static_cast<int64_t>(hi)};
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    const ExprNode& node = nodes[i];
    if (affine_[i] >= 0) {
      intervals_[i] = span(affines_[affine_[i]]);
      continue;
    }
    if (IsCompare(node.op) && affine_[node.child[0]] >= 0 && affine_[node.child[1]] >= 0) {
      // k <= q, say: the difference is exact where the difference of two intervals is not.
      const Affine& x = affines_[affine_[node.child[0]]];
      const Affine& y = affines_[affine_[node.child[1]]];
      Affine difference;
      if (!Subtract(x, y, &difference)) {
        intervals_[i] = {0, 1};
        continue;
      }
      intervals_[i] = CompareZero(node.op, span(difference));
      continue;
    }
    intervals_[i] = IntervalOf(node, box);
  }
  const Interval root = intervals_[expr_.root()];
  if (root.lo == 1) return Verdict::kAll;
  return root.hi == 0 ? Verdict::kNone : Verdict::kMixed;
}

void ExprEvaluator::RowNode(size_t i, int64_t b, int64_t h, int64_t q, int64_t k0, int count) {
  const ExprNode& node = expr_.nodes()[i];
  const bool varying = lane_[i] >= 0;
  int64_t* const out = varying ? &lanes_[static_cast<size_t>(lane_[i]) * kRun] : &uniform_[i];
  const int n = varying ? count : 1;
  const auto input = [&](int c) {
    const int child = node.child[c];
    return lane_[child] >= 0 ? &lanes_[static_cast<size_t>(lane_[child]) * kRun] : &uniform_[child];
  };
  const auto step = [&](int c) { return lane_[node.child[c]] >= 0 ? 1 : 0; };
  const auto unary = [&](auto fn) {
    const int64_t* x = input(0);
    for (int j = 0; j < n; ++j) out[j] = fn(x[j]);  // a varying node with one child has a varying child
  };
  const auto binary = [&](auto fn) {
    const int64_t* x = input(0);
    const int64_t* y = input(1);
    if (n == 1) {
      out[0] = fn(x[0], y[0]);
    } else if (step(0) == 1 && step(1) == 1) {
      for (int j = 0; j < n; ++j) out[j] = fn(x[j], y[j]);
    } else if (step(0) == 1) {
      const int64_t right = y[0];
      for (int j = 0; j < n; ++j) out[j] = fn(x[j], right);
    } else {
      const int64_t left = x[0];
      for (int j = 0; j < n; ++j) out[j] = fn(left, y[j]);
    }
  };
  using I = int64_t;
  switch (node.op) {
    case ExprOp::kK:
      for (int j = 0; j < n; ++j) out[j] = k0 + j;
      return;
    case ExprOp::kAdd:
      return binary([](I x, I y) { return x + y; });
    case ExprOp::kSub:
      return binary([](I x, I y) { return x - y; });
    case ExprOp::kMul:
      return binary([](I x, I y) { return x * y; });
    case ExprOp::kDiv:
      return binary(FloorDiv);
    case ExprOp::kMod:
      return binary(FloorMod);
    case ExprOp::kMin:
      return binary([](I x, I y) { return std::min(x, y); });
    case ExprOp::kMax:
      return binary([](I x, I y) { return std::max(x, y); });
    case ExprOp::kLt:
      return binary([](I x, I y) { return I{x < y}; });
    case ExprOp::kLe:
      return binary([](I x, I y) { return I{x <= y}; });
    case ExprOp::kGt:
      return binary([](I x, I y) { return I{x > y}; });
    case ExprOp::kGe:
      return binary([](I x, I y) { return I{x >= y}; });
    case ExprOp::kEq:
      return binary([](I x, I y) { return I{x == y}; });
    case ExprOp::kNe:
      return binary([](I x, I y) { return I{x != y}; });
    case ExprOp::kAnd:
      return binary([](I x, I y) { return x & y; });
    case ExprOp::kOr:
      return binary([](I x, I y) { return x | y; });
    case ExprOp::kNeg:
      return unary([](I x) { return -x; });
    case ExprOp::kAbs:
      return unary([](I x) { return x < 0 ? -x : x; });
    case ExprOp::kNot:
      return unary([](I x) { return 1 - x; });
    case ExprOp::kLookup: {
      const ExprOperand& operand = expr_.operands()[node.operand];
      const ExprBinding& binding = bindings_[node.operand];
      const int64_t* dims = DimsOf(operand, binding);
      for (int j = 0; j < n; ++j) {
        int64_t flat = 0;
        for (int axis = 0; axis < node.arity; ++axis) {
          const int64_t index = Broadcasts(expr_.nodes(), node, axis, dims) ? 0 : input(axis)[step(axis) * j];
          flat = flat * dims[axis] + index;
        }
        const int64_t value = operand.table ? operand.At(flat) : ReadBinding(binding, flat);
        out[j] = node.boolean ? value != 0 : value;
      }
      return;
    }
    default:
      out[0] = Leaf(node, {b, b, h, h, q, q, 0, 0}, sizes_).lo;
  }
}

void ExprEvaluator::Row(int64_t b, int64_t h, int64_t q, int64_t k0, int count, uint8_t* allowed) {
  const size_t size = expr_.nodes().size();
  for (size_t i = 0; i < size; ++i) RowNode(i, b, h, q, k0, count);
  const int root = expr_.root();
  const bool varying = lane_[root] >= 0;
  const int64_t* value = varying ? &lanes_[static_cast<size_t>(lane_[root]) * kRun] : &uniform_[root];
  for (int j = 0; j < count; ++j) allowed[j] = static_cast<uint8_t>(value[varying ? j : 0] != 0);
}

}  // namespace stof
