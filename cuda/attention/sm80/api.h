// SPDX-License-Identifier: Apache-2.0
// The family of sm_80 kernels: any problem in fp16 and bf16.
#ifndef STOF_CUDA_ATTENTION_SM80_API_H_
#define STOF_CUDA_ATTENTION_SM80_API_H_

#include "cuda/attention/kernel_table.h"

namespace stof {
namespace cuda {

using Sm80Code = LaunchCode<AttentionParams>;

extern const KernelFamily kSm80Family;

KernelTable FindSm80D32(const KernelProblem& problem);
KernelTable FindSm80D64(const KernelProblem& problem);
KernelTable FindSm80D96(const KernelProblem& problem);
KernelTable FindSm80D128(const KernelProblem& problem);
KernelTable FindSm80D160(const KernelProblem& problem);
KernelTable FindSm80D192(const KernelProblem& problem);
KernelTable FindSm80D256(const KernelProblem& problem);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_API_H_
