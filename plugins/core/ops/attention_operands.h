// SPDX-License-Identifier: Apache-2.0
// The optional operands of StofAttention that kernels read themselves: biases, the sink and padding. What else a mask
// reads is bound where the mask is evaluated.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_

#include "plugins/core/ops/attention.h"

namespace stof {

// Of which only whether a value is 0 counts.
bool IsPadType(DType dtype);

// Biases, sink and pad; on the CPU, pad is replaced in `given` by its bytes, which a dynamic part may read too; on a
// device it stays what it is.
Status BindOperands(const MaskParts& parts, Tables* given, const RunContext& context, AttentionArgs* args,
                    const Tensor** pad);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_
