// SPDX-License-Identifier: Apache-2.0
// Which CPU kernels attention takes where its products may be rounded to bf16 (AttentionArgs::allow_bf16).
#ifndef STOF_PLUGINS_CORE_CONTRACT_BF16_KERNELS_H_
#define STOF_PLUGINS_CORE_CONTRACT_BF16_KERNELS_H_

#include <optional>

#include "plugins/core/base/types.h"

namespace stof {

// The set whose kernels compute matmuls in bf16 where `isa` is the best that may run: the best one up to it that has
// such kernels. That of AMX needs a permission of the process, which is asked for here; where it is refused, the set
// before. None: products are computed in fp32.
std::optional<CpuIsa> IsaOfBf16Kernels(CpuIsa isa);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_BF16_KERNELS_H_
