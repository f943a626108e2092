// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_MASK_EXPR_AFFINE_H_
#define STOF_PLUGINS_CORE_MASK_EXPR_AFFINE_H_

#include <cstdint>

#include "plugins/core/mask/expr.h"

namespace stof {

// b * B + h * H + q * Q + k * K + constant
struct Affine {
  int64_t b = 0, h = 0, q = 0, k = 0, constant = 0;
};

inline bool IsConstant(const Affine& x) { return x.b == 0 && x.h == 0 && x.q == 0 && x.k == 0; }

// sum += scale * x; false where that overflows.
bool AddAffine(const Affine& x, int64_t scale, Affine* sum);

// The value of a node of integers as an affine form, from those of its arguments (nullptr: none); of a comparison, left
// minus right. False where it is not affine or a coefficient overflows.
bool CombineAffine(const ExprNode& node, const Affine* left, const Affine* right, const ExprSizes& sizes,
                   Affine* affine);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_EXPR_AFFINE_H_
