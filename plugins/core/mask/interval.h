// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic over the operators of mask expressions, the same on the host and on a device. Booleans are the
// intervals of 0 and 1. Every operation is inclusion isotonic: a smaller box never gives a wider interval. Therefore
// one check of the whole problem proves that no box overflows.
#ifndef STOF_PLUGINS_CORE_MASK_INTERVAL_H_
#define STOF_PLUGINS_CORE_MASK_INTERVAL_H_

#include <cstdint>

#include "plugins/core/mask/expr_affine.h"
#include "plugins/core/mask/expr_operate.h"

namespace stof {

// Every integer of a legal expression stays within ±2^61, so that the difference of any two fits 64 bits.
constexpr int64_t kLargestInteger = int64_t{1} << 61;

struct Interval {
  int64_t lo = 0;
  int64_t hi = 0;
};

// A box of pairs: batches b .. b, heads h .. h, absolute queries q_lo .. q_hi and keys k_lo .. k_hi, all inclusive.
struct ExprBox {
  int64_t b_lo = 0, b_hi = 0, h_lo = 0, h_hi = 0, q_lo = 0, q_hi = 0, k_lo = 0, k_hi = 0;
};

STOF_HOST_DEVICE bool IsArithmetic(ExprOp op) { return op >= ExprOp::kAdd && op <= ExprOp::kMax; }
STOF_HOST_DEVICE bool IsCompare(ExprOp op) { return op >= ExprOp::kLt && op <= ExprOp::kNe; }

// A node without arguments.
inline Interval LeafInterval(const ExprNode& node, const ExprBox& box, const ExprSizes& sizes) {
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

STOF_HOST_DEVICE Interval CompareInterval(ExprOp op, Interval a, Interval b) {
  switch (op) {
    case ExprOp::kLt:
      return {a.hi < b.lo, a.lo < b.hi};
    case ExprOp::kLe:
      return {a.hi <= b.lo, a.lo <= b.hi};
    case ExprOp::kGt:
      return {a.lo > b.hi, a.hi > b.lo};
    case ExprOp::kGe:
      return {a.lo >= b.hi, a.hi >= b.lo};
    case ExprOp::kEq:
      return {a.lo == a.hi && b.lo == b.hi && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi};
    default:  // kNe
      return {a.lo > b.hi || b.lo > a.hi, !(a.lo == a.hi && b.lo == b.hi && a.lo == b.lo)};
  }
}

STOF_HOST_DEVICE Interval LogicInterval(ExprOp op, Interval a, Interval b) {
  if (op == ExprOp::kAnd) return {a.lo & b.lo, a.hi & b.hi};
  if (op == ExprOp::kOr) return {a.lo | b.lo, a.hi | b.hi};
  return {1 - a.hi, 1 - a.lo};
}

STOF_HOST_DEVICE Interval AbsInterval(Interval a) {
  if (a.lo >= 0) return a;
  return a.hi <= 0 ? Interval{-a.hi, -a.lo} : Interval{0, Most(-a.lo, a.hi)};
}

// False where x * y leaves ±2^61.
STOF_HOST_DEVICE bool MulFits(int64_t x, int64_t y, int64_t* product) {
#if defined(__CUDA_ARCH__)
  *product = static_cast<int64_t>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
  const bool fits = __mul64hi(x, y) == (*product >> 63);
#else
  const bool fits = !__builtin_mul_overflow(x, y, product);
#endif
  return fits && *product >= -kLargestInteger && *product <= kLargestInteger;
}

// False where a product leaves ±2^61; such a one counts as 0.
STOF_HOST_DEVICE bool MulInterval(Interval a, Interval b, Interval* r) {
  const int64_t xs[2] = {a.lo, a.hi}, ys[2] = {b.lo, b.hi};
  bool fits = true;
  *r = {INT64_MAX, INT64_MIN};
  for (int i = 0; i < 4; ++i) {
    int64_t product = 0;
    if (!MulFits(xs[i / 2], ys[i % 2], &product)) {
      fits = false;
      product = 0;
    }
    r->lo = Least(r->lo, product), r->hi = Most(r->hi, product);
  }
  return fits;
}

// a // d and a % d for the constant divisor d; arguments are within ±2^61.
STOF_HOST_DEVICE Interval DivInterval(Interval a, int64_t d) {
  const int64_t x = FloorDiv(a.lo, d), y = FloorDiv(a.hi, d);
  return {Least(x, y), Most(x, y)};
}
STOF_HOST_DEVICE Interval ModInterval(Interval a, int64_t d) {
  if (FloorDiv(a.lo, d) == FloorDiv(a.hi, d)) return {FloorMod(a.lo, d), FloorMod(a.hi, d)};
  return d > 0 ? Interval{0, d - 1} : Interval{d + 1, 0};
}

// False where a bound leaves ±2^61. Arguments of all operators but min and max are within.
STOF_HOST_DEVICE bool ArithmeticInterval(ExprOp op, Interval a, Interval b, Interval* r) {
  bool fits = true;
  switch (op) {
    case ExprOp::kAdd:
      *r = {a.lo + b.lo, a.hi + b.hi};
      break;
    case ExprOp::kSub:
      *r = {a.lo - b.hi, a.hi - b.lo};
      break;
    case ExprOp::kMul:
      fits = MulInterval(a, b, r);
      break;
    case ExprOp::kDiv:
      *r = DivInterval(a, b.lo);
      break;
    case ExprOp::kMod:
      *r = ModInterval(a, b.lo);
      break;
    case ExprOp::kNeg:
      *r = {-a.hi, -a.lo};
      break;
    case ExprOp::kAbs:
      *r = AbsInterval(a);
      break;
    case ExprOp::kMin:
      *r = {Least(a.lo, b.lo), Least(a.hi, b.hi)};
      break;
    default:  // kMax
      *r = {Most(a.lo, b.lo), Most(a.hi, b.hi)};
  }
  return fits && r->lo >= -kLargestInteger && r->hi <= kLargestInteger;
}

// Adds factor * [lo, hi] to a sum of intervals. Partial sums may wrap, the sum itself fits: hence unsigned.
STOF_HOST_DEVICE void AddScaled(int64_t factor, int64_t lo, int64_t hi, uint64_t* sum_lo, uint64_t* sum_hi) {
  *sum_lo += static_cast<uint64_t>(factor) * static_cast<uint64_t>(factor >= 0 ? lo : hi);
  *sum_hi += static_cast<uint64_t>(factor) * static_cast<uint64_t>(factor >= 0 ? hi : lo);
}
inline Interval AffineInterval(const Affine& x, const ExprBox& box) {
  uint64_t lo = static_cast<uint64_t>(x.constant), hi = lo;
  AddScaled(x.b, box.b_lo, box.b_hi, &lo, &hi);
  AddScaled(x.h, box.h_lo, box.h_hi, &lo, &hi);
  AddScaled(x.q, box.q_lo, box.q_hi, &lo, &hi);
  AddScaled(x.k, box.k_lo, box.k_hi, &lo, &hi);
  return {static_cast<int64_t>(lo), static_cast<int64_t>(hi)};
}

// ---- look-ups ----
inline const int64_t* DimsOf(const ExprOperand& operand, const ExprBinding& binding) {
  return operand.table ? operand.dims : binding.dims;
}
// A batch or head index into an axis of size 1 reads element 0: one vector serves all batches.
inline bool Broadcasts(const MaskExpr& expr, const ExprNode& node, int axis, const int64_t* dims) {
  const ExprOp op = expr.nodes()[static_cast<size_t>(node.child[axis])].op;
  return dims[axis] == 1 && (op == ExprOp::kB || op == ExprOp::kH);
}
inline int64_t ReadBinding(const ExprBinding& binding, int64_t i) {
  switch (binding.dtype) {
    case DType::kI64:
      return static_cast<const int64_t*>(binding.data)[i];
    case DType::kI32:
      return static_cast<const int32_t*>(binding.data)[i];
    default:
      return static_cast<const uint8_t*>(binding.data)[i];
  }
}
// Boolean operands read as 0 or 1.
inline int64_t ReadOperand(const ExprOperand& operand, const ExprBinding& binding, int64_t i) {
  if (operand.table) return operand.At(i);
  const int64_t value = ReadBinding(binding, i);
  return operand.boolean ? value != 0 : value;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_INTERVAL_H_
