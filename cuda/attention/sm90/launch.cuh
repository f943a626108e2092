// SPDX-License-Identifier: Apache-2.0
// Launches the sm_90a kernels, and makes the rows of their tables.
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

// ---- the named numbers of a table's rows ----
// Sm90Shape. Stages: buffers of keys and values; QueryStages: buffers of queries; Splits: pipelines that share the keys
// of a work tile.
template <int kValue>
struct Head {};
template <int kRows, int kKeys>
struct Tile {};
template <int kValue>
struct Stages {};
template <int kValue>
struct QueryStages {};
template <int kValue>
struct Pipelines {};
template <int kValue>
struct Splits {};

// TileCost: nanoseconds of a prologue and epilogue, of a full and of a partial KV tile, of a MiB of keys and values;
// the speed of a CTA alone on its SM in percent.
struct RowNs {
  int64_t value;
};
struct FullNs {
  int64_t value;
};
struct PartialNs {
  int64_t value;
};
struct NsPerMib {
  int64_t value = 0;
};
struct SoloPct {
  int64_t value = 100;
};

template <typename S, typename T>
constexpr Sm90Code kCode(Launch<S, T>);

template <typename S, typename T>
constexpr KernelEntry MakeKernelOf(RowNs row, FullNs full, PartialNs partial, NsPerMib per_mib, SoloPct solo) {
  KernelEntry kernel;
  kernel.name = S::kFp8 ? "sm90fp8" : S::kInt8 ? "sm90int8" : "sm90";
  kernel.head_size = S::kHead;
  kernel.rows = S::kM, kernel.keys = S::kN;
  kernel.ctas_per_sm = S::kPipelines / S::kSplit;
  kernel.is_scheduled = true;
  kernel.skips_scores = S::kSkipsByScore;
  kernel.cost.row = row.value, kernel.cost.full = full.value, kernel.cost.partial = partial.value;
  kernel.cost.split_kv = S::kSplit;
  kernel.cost.ns_per_mib = per_mib.value;
  kernel.cost.can_split_rows = S::kSplitsRows;
  if (S::kHalfTiles) kernel.cost.half_tile_pct = S::kPipelines == 1 ? kHalfTilePct : kHalfTileSharedPct;
  kernel.cost.dynamic = S::kDynamic;
  kernel.cost.ctas_per_sm = kernel.ctas_per_sm;
  kernel.cost.solo_speed_pct = solo.value;
  kernel.code = &kCode<S, T>;
  return kernel;
}

// What MakeKernel makes of its arguments.
template <typename Head_, typename Tile_, typename Stages_, typename QueryStages_, typename Pipelines_,
          typename Splits_, ScoreMod kScoreMod, bool kPingPongEnds, bool kDynamic, bool kSkipsByScore,
          Operands kOperands>
struct ShapeOf;
template <int kHead, int kRows, int kKeys, int kStages, int kQueryStages, int kPipelines, int kSplits,
          ScoreMod kScoreMod, bool kPingPongEnds, bool kDynamic, bool kSkipsByScore, Operands kOperands>
struct ShapeOf<Head<kHead>, Tile<kRows, kKeys>, Stages<kStages>, QueryStages<kQueryStages>, Pipelines<kPipelines>,
               Splits<kSplits>, kScoreMod, kPingPongEnds, kDynamic, kSkipsByScore, kOperands> {
  using Type = Sm90Shape<kHead, kRows, kKeys, kStages, kQueryStages, kPipelines, kSplits, kScoreMod, kPingPongEnds,
                         kDynamic, kSkipsByScore, kOperands>;
};

// A row of a table.
template <typename T, typename Head_, typename Tile_, typename Stages_, typename QueryStages_, typename Pipelines_,
          typename Splits_ = Splits<1>, ScoreMod kScoreMod = ScoreMod::kNone, bool kPingPongEnds = false,
          bool kDynamic = false, bool kSkipsByScore = false, Operands kOperands = Operands::k16Bit>
constexpr KernelEntry MakeKernel(RowNs row, FullNs full, PartialNs partial, NsPerMib per_mib = {}, SoloPct solo = {}) {
  using Shape = ShapeOf<Head_, Tile_, Stages_, QueryStages_, Pipelines_, Splits_, kScoreMod, kPingPongEnds, kDynamic,
                        kSkipsByScore, kOperands>;
  return MakeKernelOf<typename Shape::Type, T>(row, full, partial, per_mib, solo);
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_LAUNCH_CUH_
