// SPDX-License-Identifier: Apache-2.0
// Quantizes the operands of an attention for the sm_90a kernels with 8-bit operands.
#ifndef STOF_CUDA_ATTENTION_SM90_INT8_QUANTIZE_H_
#define STOF_CUDA_ATTENTION_SM90_INT8_QUANTIZE_H_

#include "cuda/attention/job.h"
#include "cuda/attention/sm90/api.h"

namespace stof {
namespace cuda {

// Queues the kernels that quantize the operands into workspace of the job. Sets scales and TMA maps of params, whose
// `attention` is complete. False where the driver has no TMA, or a tensor cannot be described: nothing is queued.
Status QuantizeOperands(AttentionJob* job, Sm90Params* params, bool* is_described);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_INT8_QUANTIZE_H_
