// SPDX-License-Identifier: Apache-2.0
// Dequantizes keys and values for kernels that do not read int8 and fp8.
#ifndef STOF_CUDA_ATTENTION_DEQUANTIZE_H_
#define STOF_CUDA_ATTENTION_DEQUANTIZE_H_

#include "plugins/core/base/status.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Queues a kernel on context.stream that writes the T keys and values, times their scales and rounded to args.dtype,
// into workspace of context. *plain is args with these in place of the quantized ones.
Status Dequantize(const AttentionArgs& args, const RunContext& context, AttentionArgs* plain);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DEQUANTIZE_H_
