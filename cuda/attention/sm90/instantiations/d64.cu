// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {

using sm90::kPingPong;
using sm90::MakeKernel;
using sm90::Sm90Shape;

// clang-format off
// Sm90Shape: head size, query rows, keys, stages, query stages, pipelines, splits; score modification, then options.
// Costs (TileCost) in nanoseconds: tile row, full tile, partial tile, MiB of keys and values; solo speed in percent.
template <typename T>
constexpr Sm90Kernel kKernels[] = {
    MakeKernel<Sm90Shape<64, 256,  64, 6, 2, 1, 1>, T>(2516,  826,  948,  71),
    MakeKernel<Sm90Shape<64, 128,  64, 4, 2, 2, 1, ScoreMod::kNone, kPingPong>, T>(1889,  911, 1153,  45),
    MakeKernel<Sm90Shape<64, 128, 128, 4, 2, 1, 1>, T>(1529, 1015, 1085, 207),
    MakeKernel<Sm90Shape<64,  64,  64, 2, 1, 4, 4>, T>(1916, 1032, 1126,  84),
    MakeKernel<Sm90Shape<64,  64, 128, 2, 2, 2, 1>, T>(1469, 1201, 1301,  36, 182),
    MakeKernel<Sm90Shape<64,  64,  64, 2, 2, 4, 1>, T>(2290, 1283, 1283,  43, 318),
    MakeKernel<Sm90Shape<64, 192,  64, 6, 2, 1, 1>, T>(1753,  725,  831),
    MakeKernel<Sm90Shape<64,  64, 128, 2, 1, 2, 2>, T>(1028, 1328, 1411,  68),
    MakeKernel<Sm90Shape<64, 192, 128, 3, 2, 1, 1>, T>(1469, 1459, 1569,  71),
    MakeKernel<Sm90Shape<64,  64, 128, 2, 1, 3, 1>, T>(3251, 1707, 1754, 204, 159),
    {},
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr Sm90Kernel kRelativeBias[] = {
    MakeKernel<Sm90Shape<64, 192,  64, 6, 2, 1, 1, ScoreMod::kRelativeBias>, T>(2600, 1207, 1495),
    MakeKernel<Sm90Shape<64,  64, 128, 2, 1, 2, 2, ScoreMod::kRelativeBias>, T>(2240, 1680, 2100),
    {},
};

// With these and a full bias.
template <typename T>
constexpr Sm90Kernel kFullBias[] = {
    MakeKernel<Sm90Shape<64, 192,  64, 3, 1, 1, 1, ScoreMod::kFullBias>, T>(2600, 1540, 1740),
    MakeKernel<Sm90Shape<64,  64,  64, 2, 1, 2, 2, ScoreMod::kFullBias>, T>(1400, 1210, 1410),
    {},
};

// clang-format on

const Sm90Kernel* FindSm90D64(bool bf16, ScoreMod score_mod) {
  if (score_mod == ScoreMod::kFullBias) return bf16 ? kFullBias<__nv_bfloat16> : kFullBias<__half>;
  if (score_mod == ScoreMod::kRelativeBias) return bf16 ? kRelativeBias<__nv_bfloat16> : kRelativeBias<__half>;
  return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
}

}  // namespace cuda
}  // namespace stof
