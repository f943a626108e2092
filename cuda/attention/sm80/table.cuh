// SPDX-License-Identifier: Apache-2.0
// The tables of the sm_80 kernels: one kernel for each head size, type and score modification, with and without
// relative terms; in int8 for each head size and type.
#ifndef STOF_CUDA_ATTENTION_SM80_TABLE_CUH_
#define STOF_CUDA_ATTENTION_SM80_TABLE_CUH_

#include "cuda/attention/sm80/api.h"
#include "cuda/attention/sm80/launch.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
constexpr Sm80CtaSize MakeSm80CtaSize() {
  constexpr bool kRelative = kScores == Sm80Scores::kRelative;
  using R = Sm80RelativeShape<kHead, kScoreMod, kRows, kRelative>;
  static_assert(R::kStages <= CtaSize::kMostStages, "stages");
  Sm80CtaSize size;
  size.rows = kRows;
  size.ctas_per_sm = Sm80Ctas<kHead, kScoreMod, kRows, kRelative>;
  size.most_stages = R::kStages;
  for (int stages = 0; stages <= R::kStages; ++stages) {
    size.shared_bytes[stages] = kScores == Sm80Scores::kInt8 ? Sm80Int8Shape<kHead, kRows>::kSharedBytes
                                                             : R::SharedBytes(stages, R::kMostRings);
  }
  size.launch = LaunchSm80<kHead, T, kScoreMod, kRows, kScores>;
  return size;
}

template <int kHead, typename T, bool kScoreMod, Sm80Scores kScores>
constexpr Sm80Code MakeSm80Code() {
  Sm80Code code;
  code.half = MakeSm80CtaSize<kHead, T, kScoreMod, 64, kScores>();
  // With biases, registers do not suffice for more than 64 rows of smaller heads; nor with relative terms or scores in
  // int8 above 64.
  constexpr bool kHasWhole = kScores != Sm80Scores::kPlain ? kHead <= 64 && !kScoreMod : kHead > 128 || !kScoreMod;
  if constexpr (kHasWhole) code.whole = MakeSm80CtaSize<kHead, T, kScoreMod, kTileRows, kScores>();
  return code;
}
template <int kHead, typename T, bool kScoreMod, Sm80Scores kScores>
constexpr Sm80Code kSm80Code = MakeSm80Code<kHead, T, kScoreMod, kScores>();

template <int kHead, typename T, bool kScoreMod, Sm80Scores kScores>
constexpr KernelEntry MakeSm80Kernel() {
  KernelEntry kernel;
  kernel.name = "sm80";
  kernel.head_size = kHead;
  kernel.rows = kTileRows, kernel.keys = kTileKeys;
  kernel.code = &kSm80Code<kHead, T, kScoreMod, kScores>;
  return kernel;
}

template <int kHead, typename T, bool kScoreMod, Sm80Scores kScores>
constexpr KernelEntry kSm80Kernels[] = {MakeSm80Kernel<kHead, T, kScoreMod, kScores>()};

template <int kHead, Sm80Scores kScores = Sm80Scores::kPlain>
KernelTable FindSm80(const KernelProblem& problem) {
  const bool score_mod = problem.score_mod() != ScoreMod::kNone;
  if (problem.dtype == DType::kBF16) {
    return score_mod ? kSm80Kernels<kHead, __nv_bfloat16, true, kScores>
                     : kSm80Kernels<kHead, __nv_bfloat16, false, kScores>;
  }
  return score_mod ? kSm80Kernels<kHead, __half, true, kScores> : kSm80Kernels<kHead, __half, false, kScores>;
}

template <int kHead>
KernelTable FindSm80Int8(const KernelProblem& problem) {
  return problem.dtype == DType::kBF16 ? kSm80Kernels<kHead, __nv_bfloat16, false, Sm80Scores::kInt8>
                                       : kSm80Kernels<kHead, __half, false, Sm80Scores::kInt8>;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_TABLE_CUH_
