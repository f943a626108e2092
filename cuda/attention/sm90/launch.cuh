// SPDX-License-Identifier: Apache-2.0
// Launches the sm_90a kernels, and makes the entries of their lists.
#ifndef STOF_CUDA_ATTENTION_SM90_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_SM90_LAUNCH_CUH_

#include "cuda/attention/sm90/combine.cuh"
#include "cuda/attention/sm90/kernel.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

template <typename S, typename T>
int Launch(const Sm90Params& params, void* stream) {
  constexpr int kCtasPerBlock = S::kPipelines / S::kSplit;  // CTAs of the tile schedule in a thread block
  const auto ctas = static_cast<unsigned>((params.ctas + kCtasPerBlock - 1) / kCtasPerBlock);
  const int error =
      LaunchKernel<Sm90Params, AttentionKernel<S, T>>(params, ctas, S::kThreads, S::kSharedBytes, stream, true);
  if constexpr (S::kSplitsRows) {
    // Loads the combine kernel together with the other one: the next problem may have split rows, and be captured.
    const int loaded = LoadKernel<Sm90Params, CombineKernel<T, S::kHead>>(0);
    if (loaded != 0) return loaded;
    if (error == 0 && params.split_row_count > 0) {
      const auto combine_ctas = static_cast<unsigned>(params.split_row_count) * (S::kHead / kCombineColumns);
      return LaunchKernel<Sm90Params, CombineKernel<T, S::kHead>>(params, combine_ctas, kWarpgroup, 0, stream, true);
    }
  }
  return error;
}

// Cost of a half tile in percent of its tile row: where a CTA has its SM alone, and where it shares it.
constexpr int64_t kHalfTilePct = 74, kHalfTileSharedPct = 86;

// An entry of a kernel list. row, full, partial: nanoseconds of a prologue and epilogue, a full and a partial KV tile.
// ns_per_mib, solo_speed_pct: as in TileCost.
template <typename S, typename T>
constexpr Sm90Kernel MakeKernel(int64_t row, int64_t full, int64_t partial, int64_t ns_per_mib = 0,
                                int64_t solo_speed_pct = 100) {
  const int64_t half = S::kPipelines == 1 ? kHalfTilePct : kHalfTileSharedPct;
  const TileCost cost = {row,
                         full,
                         partial,
                         S::kSplit,
                         ns_per_mib,
                         S::kSplitsRows,
                         S::kHalfTiles ? half : 0,
                         S::kDynamic,
                         S::kPipelines / S::kSplit,
                         solo_speed_pct};
  return {S::kM, S::kN, S::kPipelines / S::kSplit, S::kHead, cost, Launch<S, T>};
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_LAUNCH_CUH_
