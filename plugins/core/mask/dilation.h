// SPDX-License-Identifier: Apache-2.0
// Masks that let a query attend keys at distances divisible by some m alone ("dilated", "strided"). Queries and keys of
// one remainder then meet nobody else: every m-th position is a problem of its own, with an m-th of the keys and with
// tiles that the mask fills.
#ifndef STOF_PLUGINS_CORE_MASK_DILATION_H_
#define STOF_PLUGINS_CORE_MASK_DILATION_H_

#include <cstdint>
#include <string>

#include "plugins/core/mask/expr.h"

namespace stof {

// What a mask says of the positions q = m q' + r and k = m k' + r, in q' and k'; the same for every remainder r.
struct ResidueMask {
  int64_t modulus = 1;  // m; 1: the mask is not of this kind
  std::string text;     // with S, T and P of the positions q' and k', an m-th of the whole problem's
};

// modulus 1 where no conjunct asks for such distances, where the others tell remainders, batches or heads apart, where
// they read tables, and where a window leaves a query so few keys that parts have as many tiles as the whole.
ResidueMask FindResidues(const MaskExpr& expr);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_DILATION_H_
