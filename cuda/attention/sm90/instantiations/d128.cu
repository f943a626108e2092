// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {

using sm90::kDynamicTiles;
using sm90::kPingPong;
using sm90::MakeKernel;
using sm90::Sm90Shape;

// clang-format off
// Sm90Shape: head size, query rows, keys, stages, query stages, pipelines, splits; score modification, then options.
// Costs (TileCost) in nanoseconds: tile row, full tile, partial tile, MiB of keys and values; solo speed in percent.
template <typename T>
constexpr Sm90Kernel kKernels[] = {
    MakeKernel<Sm90Shape<128, 128, 128, 2, 2, 1, 1, ScoreMod::kNone, kPingPong>, T>(2184, 1373, 1510,  33),
    MakeKernel<Sm90Shape<128, 192,  64, 4, 1, 1, 1, ScoreMod::kNone, kPingPong>, T>(3912,  941, 1117),
    MakeKernel<Sm90Shape<128,  64,  64, 2, 1, 2, 2>, T>(2113, 1030, 1040),
    MakeKernel<Sm90Shape<128,  64,  64, 3, 1, 2, 1>, T>(1577,  986, 1006,  99),
    MakeKernel<Sm90Shape<128, 128,  64, 4, 2, 1, 1, ScoreMod::kNone, kPingPong, kDynamicTiles>, T>(1010,  845,  872,  18),
    MakeKernel<Sm90Shape<128,  64,  96, 2, 1, 2, 1>, T>(1615, 1464, 1478, 405),
    MakeKernel<Sm90Shape<128, 128,  96, 3, 1, 1, 1>, T>(2252, 1163, 1273,  33),
    {},
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr Sm90Kernel kRelativeBias[] = {
    MakeKernel<Sm90Shape<128, 128, 128, 2, 2, 1, 1, ScoreMod::kRelativeBias>, T>(2200, 1850, 1950),
    MakeKernel<Sm90Shape<128, 192,  64, 4, 1, 1, 1, ScoreMod::kRelativeBias>, T>(3967, 1560, 1660),
    {},
};

// With these and a full bias.
template <typename T>
constexpr Sm90Kernel kFullBias[] = {
    MakeKernel<Sm90Shape<128, 128,  64, 2, 1, 1, 1, ScoreMod::kFullBias>, T>(2057, 1480, 1580),
    {},
};

// clang-format on

const Sm90Kernel* FindSm90D128(bool bf16, ScoreMod score_mod) {
  if (score_mod == ScoreMod::kFullBias) return bf16 ? kFullBias<__nv_bfloat16> : kFullBias<__half>;
  if (score_mod == ScoreMod::kRelativeBias) return bf16 ? kRelativeBias<__nv_bfloat16> : kRelativeBias<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
