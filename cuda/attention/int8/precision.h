// SPDX-License-Identifier: Apache-2.0
// Which problems the kernels with 8-bit operands take. Plain C++.
#ifndef STOF_CUDA_ATTENTION_INT8_PRECISION_H_
#define STOF_CUDA_ATTENTION_INT8_PRECISION_H_

#include <cstdint>

#include "plugins/core/contract/attention_args.h"

namespace stof {
namespace cuda {

// The precision that the problem's kernel may have: AttentionArgs::precision, or kFull where no kernel with 8-bit
// operands computes the problem, decoding included. AttentionJob::Describe adds what depends on the device and the
// padding.
AttentionPrecision Int8PrecisionOf(const AttentionArgs& args);

// An upper bound of the bytes of 8-bit operands for these arguments and smaller ones.
int64_t BoundInt8Workspace(const AttentionArgs& args);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_PRECISION_H_
