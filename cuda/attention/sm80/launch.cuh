// SPDX-License-Identifier: Apache-2.0
// Launches of the sm_80 kernel.
#ifndef STOF_CUDA_ATTENTION_SM80_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_SM80_LAUNCH_CUH_

#include "cuda/attention/sm80/kernel.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {

struct Sm80Params {
  AttentionParams attention;
  int stages = 0;
};
struct Sm80RelativeParams : Sm80Params {
  RelativeParams relative;
};
struct Sm80Int8Params : Sm80Params {
  Int8Scales int8;
};
template <Sm80Scores kScores>
using Sm80ParamsOf = std::conditional_t<kScores == Sm80Scores::kRelative, Sm80RelativeParams,
                                        std::conditional_t<kScores == Sm80Scores::kInt8, Sm80Int8Params, Sm80Params>>;

template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__global__ void __launch_bounds__(Sm80Shape<kHead, kScoreMod, kRows>::kThreads,
                                  (Sm80Ctas<kHead, kScoreMod, kRows, kScores == Sm80Scores::kRelative>))
    AttentionKernel(const __grid_constant__ Sm80ParamsOf<kScores> params) {
  extern __shared__ __align__(128) unsigned char shared[];
  T* const memory = reinterpret_cast<T*>(shared);
  using Attention = Sm80Attention<kHead, T, kScoreMod, kRows, kScores>;
  if constexpr (kScores == Sm80Scores::kRelative) {
    WaitForPrevious();  // it started under the kernel that prepares the tables
    Attention(params.attention, {params.relative}, params.stages, memory).Run();
  } else if constexpr (kScores == Sm80Scores::kInt8) {
    Attention(params.attention, {params.int8}, params.stages, memory).Run();
  } else {
    Attention(params.attention, {}, params.stages, memory).Run();
  }
}

template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
int LaunchSm80(const AttentionParams& params, const RelativeParams& relative, const Int8Scales& int8, int stages,
               void* stream) {
  using S = Sm80Shape<kHead, kScoreMod, kRows>;
  using R = Sm80RelativeShape<kHead, kScoreMod, kRows, kScores == Sm80Scores::kRelative>;
  using Params = Sm80ParamsOf<kScores>;
  Params copy;
  copy.attention = params;
  copy.stages = stages;
  int rings = 0;
  bool early = false;
  if constexpr (kScores == Sm80Scores::kRelative) {
    copy.relative = relative;
    rings = (relative.key[0].band.rows != nullptr ? 1 : 0) + (relative.query.band.rows != nullptr ? 1 : 0);
    if (relative.key[1].band.rows != nullptr && R::HasRing(true)) ++rings;
    // Launches have different sizes, and the first one would limit all others.
    const int loaded =
        LoadKernel<Params, AttentionKernel<kHead, T, kScoreMod, kRows, kScores>>(R::SharedBytes(stages, R::kMostRings));
    if (loaded != 0) return loaded;
    early = CanStartEarly<Params, AttentionKernel<kHead, T, kScoreMod, kRows, kScores>>();
  }
  if constexpr (kScores == Sm80Scores::kInt8) copy.int8 = int8;
  const int bytes =
      kScores == Sm80Scores::kInt8 ? Sm80Int8Shape<kHead, kRows>::kSharedBytes : R::SharedBytes(stages, rings);
  const int64_t items = int64_t{params.B} * params.H * ((params.S + kTileRows - 1) / kTileRows) * S::kCtasPerTile;
  return LaunchKernel<Params, AttentionKernel<kHead, T, kScoreMod, kRows, kScores>>(copy, static_cast<unsigned>(items),
                                                                                    S::kThreads, bytes, stream, early);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_LAUNCH_CUH_
