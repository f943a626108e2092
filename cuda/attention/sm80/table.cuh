// SPDX-License-Identifier: Apache-2.0
// The tables of the sm_80 kernels: one kernel for each head size, type and score modification.
#ifndef STOF_CUDA_ATTENTION_SM80_TABLE_CUH_
#define STOF_CUDA_ATTENTION_SM80_TABLE_CUH_

#include "cuda/attention/sm80/api.h"
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, bool kScoreMod, int kRows>
constexpr Sm80CtaSize MakeSm80CtaSize() {
  using S = Sm80Shape<kHead, kScoreMod, kRows>;
  static_assert(S::kStages <= CtaSize::kMostStages, "stages");
  Sm80CtaSize size;
  size.rows = kRows;
  size.ctas_per_sm = S::kCtas;
  size.most_stages = S::kStages;
  for (int stages = 0; stages <= S::kStages; ++stages) size.shared_bytes[stages] = S::SharedBytes(stages);
  size.launch = LaunchSm80<kHead, T, kScoreMod, kRows>;
  return size;
}

template <int kHead, typename T, bool kScoreMod>
constexpr Sm80Code MakeSm80Code() {
  Sm80Code code;
  code.half = MakeSm80CtaSize<kHead, T, kScoreMod, 64>();
  // With biases, registers do not suffice for more than 64 rows of smaller heads.
  if constexpr (kHead > 128 || !kScoreMod) code.whole = MakeSm80CtaSize<kHead, T, kScoreMod, kTileRows>();
  return code;
}
template <int kHead, typename T, bool kScoreMod>
constexpr Sm80Code kSm80Code = MakeSm80Code<kHead, T, kScoreMod>();

template <int kHead, typename T, bool kScoreMod>
constexpr KernelEntry MakeSm80Kernel() {
  KernelEntry kernel;
  kernel.name = "sm80";
  kernel.head_size = kHead;
  kernel.rows = kTileRows, kernel.keys = kTileKeys;
  kernel.code = &kSm80Code<kHead, T, kScoreMod>;
  return kernel;
}

template <int kHead, typename T, bool kScoreMod>
constexpr KernelEntry kSm80Kernels[] = {MakeSm80Kernel<kHead, T, kScoreMod>()};

template <int kHead>
KernelTable FindSm80(const KernelProblem& problem) {
  const bool score_mod = problem.score_mod() != ScoreMod::kNone;
  if (problem.dtype == DType::kBF16) {
    return score_mod ? kSm80Kernels<kHead, __nv_bfloat16, true> : kSm80Kernels<kHead, __nv_bfloat16, false>;
  }
  return score_mod ? kSm80Kernels<kHead, __half, true> : kSm80Kernels<kHead, __half, false>;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_TABLE_CUH_
