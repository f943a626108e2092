// SPDX-License-Identifier: Apache-2.0
// The family of sm_80 kernels: any problem in fp16 and bf16, perhaps with scores in int8.
#ifndef STOF_CUDA_ATTENTION_SM80_API_H_
#define STOF_CUDA_ATTENTION_SM80_API_H_

#include "cuda/attention/int8/layout.h"
#include "cuda/attention/kernel_table.h"
#include "cuda/attention/relative/params.h"

namespace stof {
namespace cuda {

struct Sm80CtaSize : CtaSize {
  // relative: of kernels with relative terms. int8: of those in int8, for which query and key of params are codes.
  int (*launch)(const AttentionParams& params, const RelativeParams& relative, const Int8Scales& int8, int stages,
                void* stream) = nullptr;
};
struct Sm80Code : KernelCode {
  Sm80CtaSize half;   // CTAs of 64 rows, half a tile of the block mask
  Sm80CtaSize whole;  // CTAs of a tile
};

// Sets rows and stages of a plan. Of params, B, H and S count. has_parts: a relative term is one of parts of positions.
// False: the device has too little shared memory.
bool ChooseSm80Size(const AttentionParams& params, bool has_parts, const DeviceProperties& device, AttentionPlan* plan);

extern const KernelFamily kSm80Family;

KernelTable FindSm80D32(const KernelProblem& problem);
KernelTable FindSm80D64(const KernelProblem& problem);
KernelTable FindSm80D96(const KernelProblem& problem);
KernelTable FindSm80D128(const KernelProblem& problem);
KernelTable FindSm80D160(const KernelProblem& problem);
KernelTable FindSm80D192(const KernelProblem& problem);
KernelTable FindSm80D256(const KernelProblem& problem);
// With scores in int8.
KernelTable FindSm80Int8D64(const KernelProblem& problem);
KernelTable FindSm80Int8D128(const KernelProblem& problem);
// With relative terms.
KernelTable FindSm80RelativeD32(const KernelProblem& problem);
KernelTable FindSm80RelativeD64(const KernelProblem& problem);
KernelTable FindSm80RelativeD96(const KernelProblem& problem);
KernelTable FindSm80RelativeD128(const KernelProblem& problem);
KernelTable FindSm80RelativeD160(const KernelProblem& problem);
KernelTable FindSm80RelativeD192(const KernelProblem& problem);
KernelTable FindSm80RelativeD256(const KernelProblem& problem);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_API_H_
