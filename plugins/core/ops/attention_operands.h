// SPDX-License-Identifier: Apache-2.0
// The optional operands of StofAttention that kernels read themselves: biases, the sink and the key padding mask. Other
// operands of a mask are bound where the mask is evaluated.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_

#include "plugins/core/ops/attention.h"

namespace stof {

// Whether a key padding mask may be of this type. Only whether a value is 0 counts.
bool IsPadType(DType dtype);

// Each checks type and shape of an operand and binds it.
Status BindBias(const Tensor& bias, const AttentionShape& shape, PairBias* bound);
Status BindSink(const Tensor& sink, const AttentionShape& shape, SinkLogits* bound);

// Binds biases, sink and pad. On the CPU pad is replaced in `given` by bytes, which dynamic conjuncts may read, too. On
// a device it stays as it is.
Status BindOperands(const MaskParts& parts, Tables* given, const RunContext& context, AttentionArgs* args,
                    const Tensor** pad);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_OPERANDS_H_
