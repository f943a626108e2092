// SPDX-License-Identifier: Apache-2.0
// The family of kernels for fp32 tensors.
#ifndef STOF_CUDA_ATTENTION_FP32_API_H_
#define STOF_CUDA_ATTENTION_FP32_API_H_

#include "cuda/attention/kernel_table.h"
#include "cuda/attention/relative/params.h"

namespace stof {
namespace cuda {

// Keys and values as the kernel reads them: tiles of kTileKeys rows. A tile is a plane of high fp16 parts and, unless
// products have the error of TF32, one of low parts. It is in the order of shared memory, with zeros beyond T and the
// head size.
struct Fp32Params {
  AttentionParams attention;
  const void* key_tiles = nullptr;       // [B, G, tiles, planes, kTileKeys, head]
  const void* value_tiles = nullptr;     // the same
  const float* key_factors = nullptr;    // [B, G, tiles, kTileKeys]: key = (high + low) * factor
  const float* value_factors = nullptr;  // [B, G, tiles]: value = (high + low / 2^11) * factor
};

struct Fp32CtaSize : CtaSize {
  // l2_heads: query heads of an L2 head group.
  using Launch = int (*)(const Fp32Params& params, int stages, int l2_heads, void* stream);
  Launch launch = nullptr;
  Launch launch_score_mod = nullptr;  // with softcap or a bias; nullptr: this size has none
  // Of kernels with relative terms, which have no other launcher.
  int (*launch_relative)(const Fp32Params& params, const RelativeParams& relative, int stages, int l2_heads,
                         void* stream) = nullptr;
};
struct Fp32Code : KernelCode {
  int planes = 0;                                                  // 2: high and low parts; 1: high parts alone
  int (*split)(const Fp32Params& params, void* stream) = nullptr;  // nullptr: that of the kernel without relative terms
  Fp32CtaSize sizes[3];                                            // of 64, 128 and 32 rows
};

// Sets rows and stages of a plan. params: with the block mask, of which the mean length of a row counts. False: the
// device has too little shared memory.
bool ChooseFp32Size(const AttentionParams& params, bool has_score_mod, const DeviceProperties& device,
                    AttentionPlan* plan);

extern const KernelFamily kFp32Family;

KernelTable FindFp32D32(const KernelProblem& problem);
KernelTable FindFp32D64(const KernelProblem& problem);
KernelTable FindFp32D96(const KernelProblem& problem);
KernelTable FindFp32D128(const KernelProblem& problem);
KernelTable FindFp32D192(const KernelProblem& problem);
KernelTable FindFp32D256(const KernelProblem& problem);
// With relative terms.
KernelTable FindFp32RelativeD32(const KernelProblem& problem);
KernelTable FindFp32RelativeD64(const KernelProblem& problem);
KernelTable FindFp32RelativeD96(const KernelProblem& problem);
KernelTable FindFp32RelativeD128(const KernelProblem& problem);
KernelTable FindFp32RelativeD192(const KernelProblem& problem);
KernelTable FindFp32RelativeD256(const KernelProblem& problem);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_API_H_
