// SPDX-License-Identifier: Apache-2.0
// Interval arithmetic over the operators of mask expressions. Booleans are the intervals of 0 and 1. Every operation is
// inclusion isotonic: a smaller box never gives a wider interval, which is why one check of the whole problem proves
// that no box overflows.
#ifndef STOF_PLUGINS_CORE_MASK_INTERVAL_H_
#define STOF_PLUGINS_CORE_MASK_INTERVAL_H_

#include <algorithm>
#include <cstdint>
#include <limits>

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

inline bool IsArithmetic(ExprOp op) { return op >= ExprOp::kAdd && op <= ExprOp::kMax; }
inline bool IsCompare(ExprOp op) { return op >= ExprOp::kLt && op <= ExprOp::kNe; }

// What has no arguments, except look-ups.
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

// Comparison of a value in `a` with 0.
inline Interval CompareZero(ExprOp op, Interval a) {
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

inline Interval LogicInterval(ExprOp op, Interval a, Interval b) {
  if (op == ExprOp::kAnd) return {a.lo & b.lo, a.hi & b.hi};
  if (op == ExprOp::kOr) return {a.lo | b.lo, a.hi | b.hi};
  return {1 - a.hi, 1 - a.lo};
}

inline bool MulInterval(Interval a, Interval b, Interval* r) {
  *r = {std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  for (const int64_t x : {a.lo, a.hi}) {
    for (const int64_t y : {b.lo, b.hi}) {
      int64_t product = 0;
      if (__builtin_mul_overflow(x, y, &product)) return false;
      r->lo = std::min(r->lo, product);
      r->hi = std::max(r->hi, product);
    }
  }
  return true;
}

// a // d and a % d for the constant divisor d; arguments are within ±2^61.
inline Interval DivInterval(Interval a, int64_t d) {
  const int64_t x = FloorDiv(a.lo, d);
  const int64_t y = FloorDiv(a.hi, d);
  return {std::min(x, y), std::max(x, y)};
}
inline Interval ModInterval(Interval a, int64_t d) {
  if (FloorDiv(a.lo, d) == FloorDiv(a.hi, d)) return {FloorMod(a.lo, d), FloorMod(a.hi, d)};
  return d > 0 ? Interval{0, d - 1} : Interval{d + 1, 0};
}

// False when a bound leaves ±2^61.
inline bool ArithmeticInterval(ExprOp op, Interval a, Interval b, Interval* r) {
  bool fits = true;
  switch (op) {
    case ExprOp::kAdd:
      *r = {a.lo + b.lo, a.hi + b.hi};  // arguments are within ±2^61
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
      *r = a.lo >= 0 ? a : a.hi <= 0 ? Interval{-a.hi, -a.lo} : Interval{0, std::max(-a.lo, a.hi)};
      break;
    case ExprOp::kMin:
      *r = {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
      break;
    default:
      *r = {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
  }
  return fits && r->lo >= -kLargestInteger && r->hi <= kLargestInteger;
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
