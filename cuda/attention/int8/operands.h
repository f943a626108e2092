// SPDX-License-Identifier: Apache-2.0
// The 8-bit operands of an attention, in the workspace of its job.
#ifndef STOF_CUDA_ATTENTION_INT8_OPERANDS_H_
#define STOF_CUDA_ATTENTION_INT8_OPERANDS_H_

#include "cuda/attention/int8/layout.h"
#include "cuda/attention/job.h"

namespace stof {
namespace cuda {

// Places the operands of an attention, whose parameters are complete, in workspace of the job: what LaunchQuantize
// writes. has_fp8_values: values in e4m3, too.
Status PlaceOperands(AttentionJob* job, const AttentionParams& attention, bool has_fp8_values, Int8Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_OPERANDS_H_
