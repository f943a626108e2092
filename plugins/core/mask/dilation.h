// SPDX-License-Identifier: Apache-2.0
// Dilated masks: a query attends only to keys at distances divisible by some m. Queries and keys of one residue class
// modulo m then form a dense problem of their own, with an m-th of the keys and with tiles that the mask fills.
#ifndef STOF_PLUGINS_CORE_MASK_DILATION_H_
#define STOF_PLUGINS_CORE_MASK_DILATION_H_

#include <cstdint>

#include "plugins/core/mask/expr.h"

namespace stof {

// The mask of the positions q = m q' + r and k = m k' + r, in q' and k'; the same for every residue r.
struct ResidueMask {
  int64_t modulus = 1;  // m; 1: the mask is not dilated
  MaskExpr expr;        // S, T and P count positions q' and k': an m-th of the whole problem's
};

// Finds a conjunct that asks for such distances. modulus is 1 where there is none, where the other conjuncts depend on
// the residue, the batch or the head, where they read tables, and where a window leaves a query so few keys that a
// class has as many tiles as the whole.
ResidueMask FindResidues(const MaskExpr& expr);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_DILATION_H_
