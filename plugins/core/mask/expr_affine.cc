// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/expr_affine.h"

namespace stof {

bool AddAffine(const Affine& x, int64_t scale, Affine* sum) {
  const int64_t from[] = {x.b, x.h, x.q, x.k, x.constant};
  int64_t* to[] = {&sum->b, &sum->h, &sum->q, &sum->k, &sum->constant};
  for (int j = 0; j < 5; ++j) {
    int64_t product = 0;
    if (__builtin_mul_overflow(from[j], scale, &product) || __builtin_add_overflow(*to[j], product, to[j])) {
      return false;
    }
  }
  return true;
}

bool CombineAffine(const ExprNode& node, const Affine* left, const Affine* right, const ExprSizes& sizes,
                   Affine* affine) {
  switch (node.op) {
    case ExprOp::kConst:
      affine->constant = node.value;
      return true;
    case ExprOp::kB:
      affine->b = 1;
      return true;
    case ExprOp::kH:
      affine->h = 1;
      return true;
    case ExprOp::kQ:
      affine->q = 1;
      return true;
    case ExprOp::kK:
      affine->k = 1;
      return true;
    case ExprOp::kS:
      affine->constant = sizes.S;
      return true;
    case ExprOp::kT:
      affine->constant = sizes.T;
      return true;
    case ExprOp::kP:
      affine->constant = sizes.P;
      return true;
    case ExprOp::kNeg:
      return left != nullptr && AddAffine(*left, -1, affine);
    case ExprOp::kAdd:
      return left != nullptr && right != nullptr && AddAffine(*left, 1, affine) && AddAffine(*right, 1, affine);
    case ExprOp::kMul:
      if (left == nullptr || right == nullptr) return false;
      if (IsConstant(*left)) return AddAffine(*right, left->constant, affine);
      return IsConstant(*right) && AddAffine(*left, right->constant, affine);
    case ExprOp::kSub:
    case ExprOp::kLt:
    case ExprOp::kLe:
    case ExprOp::kGt:
    case ExprOp::kGe:
    case ExprOp::kEq:
    case ExprOp::kNe:
      return left != nullptr && right != nullptr && AddAffine(*left, 1, affine) && AddAffine(*right, -1, affine);
    default:
      return false;
  }
}

}  // namespace stof
