// SPDX-License-Identifier: Apache-2.0
// Times an operator on the device, for the tuner.
#ifndef STOF_CUDA_COMMON_TIME_OP_H_
#define STOF_CUDA_COMMON_TIME_OP_H_

#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {

// Microseconds of one run of a prepared operator: the median of a captured graph's replays for up to `seconds`. Inputs
// with data are copied from host memory. Inputs without are filled with random numbers below 2 in magnitude, integers
// with zeros.
Status TimeOp(const Op& op, const Tensor* inputs, int input_count, int output_count, double seconds,
              double* microseconds);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_TIME_OP_H_
