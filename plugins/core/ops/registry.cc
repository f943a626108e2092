// SPDX-License-Identifier: Apache-2.0
#include <array>

#include "plugins/core/host/fork_guard.h"
#include "plugins/core/ops/attention.h"
#include "plugins/core/ops/chain.h"
#include "plugins/core/ops/gemm.h"

namespace stof {

const OpDescription* const* AllOps(int* count) {
  using Ops = std::array<const OpDescription*, 3>;
  static ProcessWide<const Ops> all;
  const Ops& ops = all.Get([] { return Ops{AttentionDescription(), ChainDescription(), GemmDescription()}; });
  *count = static_cast<int>(ops.size());
  return ops.data();
}

}  // namespace stof
