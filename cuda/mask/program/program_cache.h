// SPDX-License-Identifier: Apache-2.0
// A cache of mask programs: every run of a mask that is made on the device needs one.
#ifndef STOF_CUDA_MASK_PROGRAM_PROGRAM_CACHE_H_
#define STOF_CUDA_MASK_PROGRAM_PROGRAM_CACHE_H_

#include "cuda/mask/program/mask_program.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {
namespace cuda {

// Calls CompileMask for the static and dynamic conjuncts of a mask. Keeps the program for the next call with the same
// sizes and inputs of the same types and shapes, at any addresses.
Status GetMaskProgram(const AttentionMask& mask, const ExprSizes& sizes, const MaskInputs& inputs,
                      MaskProgram* program);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_PROGRAM_PROGRAM_CACHE_H_
