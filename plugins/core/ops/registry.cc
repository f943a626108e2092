// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/chain.h"
#include "plugins/core/ops/gemm.h"

namespace stof {

const OpDescription* const* AllOps(int* count) {
  static const OpDescription* const ops[] = {AttentionDescription(), ChainDescription(), GemmDescription()};
  *count = static_cast<int>(sizeof ops / sizeof ops[0]);
  return ops;
}

}  // namespace stof
