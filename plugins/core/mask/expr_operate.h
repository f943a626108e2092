// SPDX-License-Identifier: Apache-2.0
// The operators of mask expressions on two values, the same on the host and on a device.
#ifndef STOF_PLUGINS_CORE_MASK_EXPR_OPERATE_H_
#define STOF_PLUGINS_CORE_MASK_EXPR_OPERATE_H_

#include "plugins/core/mask/expr.h"

#if defined(__CUDACC__)
#define STOF_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define STOF_HOST_DEVICE inline
#endif

namespace stof {

STOF_HOST_DEVICE int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }
STOF_HOST_DEVICE int64_t Most(int64_t a, int64_t b) { return a < b ? b : a; }

// Quotient rounded towards minus infinity, and its remainder, which has the sign of d.
template <typename V>
STOF_HOST_DEVICE V FloorDiv(V a, V d) {
  const V quotient = a / d;
  return quotient * d != a && ((a < 0) != (d < 0)) ? quotient - 1 : quotient;
}
template <typename V>
STOF_HOST_DEVICE V FloorMod(V a, V d) {
  const V rest = a % d;
  return rest != 0 && ((rest < 0) != (d < 0)) ? rest + d : rest;
}

template <typename V>
STOF_HOST_DEVICE bool Compare(ExprOp op, V x, V y) {
  switch (op) {
    case ExprOp::kLt:
      return x < y;
    case ExprOp::kLe:
      return x <= y;
    case ExprOp::kGt:
      return x > y;
    case ExprOp::kGe:
      return x >= y;
    case ExprOp::kEq:
      return x == y;
    default:  // kNe
      return x != y;
  }
}

// A unary operator takes x alone. Booleans are 0 and 1.
template <typename V>
STOF_HOST_DEVICE V Operate(ExprOp op, V x, V y) {
  switch (op) {
    case ExprOp::kAdd:
      return x + y;
    case ExprOp::kSub:
      return x - y;
    case ExprOp::kMul:
      return x * y;
    case ExprOp::kMin:
      return x < y ? x : y;
    case ExprOp::kMax:
      return x < y ? y : x;
    case ExprOp::kLt:
    case ExprOp::kLe:
    case ExprOp::kGt:
    case ExprOp::kGe:
    case ExprOp::kEq:
    case ExprOp::kNe:
      return Compare(op, x, y);
    case ExprOp::kAnd:
      return x & y;
    case ExprOp::kOr:
      return x | y;
    case ExprOp::kNeg:
      return -x;
    case ExprOp::kAbs:
      return x < 0 ? -x : x;
    case ExprOp::kNot:
      return 1 - x;
    case ExprOp::kDiv:
      return FloorDiv(x, y);
    default:  // kMod
      return FloorMod(x, y);
  }
}

// The operator that gives the same with its arguments exchanged; kSub then gives the negative.
STOF_HOST_DEVICE ExprOp MirrorComparison(ExprOp op) {
  switch (op) {
    case ExprOp::kLt:
      return ExprOp::kGt;
    case ExprOp::kLe:
      return ExprOp::kGe;
    case ExprOp::kGt:
      return ExprOp::kLt;
    case ExprOp::kGe:
      return ExprOp::kLe;
    default:
      return op;
  }
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_EXPR_OPERATE_H_
