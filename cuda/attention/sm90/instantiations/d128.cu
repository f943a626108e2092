// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

template <typename T>
constexpr KernelEntry kKernels[] = {
    MakeKernel<T, Head<128>, Tile<128, 128>, Stages<2>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone,
               kPingPong>(RowNs{2184}, FullNs{1373}, PartialNs{1510}, NsPerMib{33}),
    MakeKernel<T, Head<128>, Tile<192, 64>, Stages<4>, QueryStages<1>, Pipelines<1>, Splits<1>, ScoreMod::kNone,
               kPingPong>(RowNs{3912}, FullNs{941}, PartialNs{1117}),
    MakeKernel<T, Head<128>, Tile<64, 64>, Stages<2>, QueryStages<1>, Pipelines<2>, Splits<2>>(
        RowNs{2113}, FullNs{1030}, PartialNs{1040}),
    MakeKernel<T, Head<128>, Tile<64, 64>, Stages<3>, QueryStages<1>, Pipelines<2>>(RowNs{1577}, FullNs{986},
                                                                                    PartialNs{1006}, NsPerMib{99}),
    MakeKernel<T, Head<128>, Tile<128, 64>, Stages<4>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone,
               kPingPong, kDynamicTiles>(RowNs{1010}, FullNs{845}, PartialNs{872}, NsPerMib{18}),
    MakeKernel<T, Head<128>, Tile<64, 96>, Stages<2>, QueryStages<1>, Pipelines<2>>(RowNs{1615}, FullNs{1464},
                                                                                    PartialNs{1478}, NsPerMib{405}),
    MakeKernel<T, Head<128>, Tile<128, 96>, Stages<3>, QueryStages<1>, Pipelines<1>>(RowNs{2252}, FullNs{1163},
                                                                                     PartialNs{1273}, NsPerMib{33}),
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr KernelEntry kRelativeBias[] = {
    MakeKernel<T, Head<128>, Tile<128, 128>, Stages<2>, QueryStages<2>, Pipelines<1>, Splits<1>,
               ScoreMod::kRelativeBias>(RowNs{2200}, FullNs{1850}, PartialNs{1950}),
    MakeKernel<T, Head<128>, Tile<192, 64>, Stages<4>, QueryStages<1>, Pipelines<1>, Splits<1>,
               ScoreMod::kRelativeBias>(RowNs{3967}, FullNs{1560}, PartialNs{1660}),
};

// With these and a full bias.
template <typename T>
constexpr KernelEntry kFullBias[] = {
    MakeKernel<T, Head<128>, Tile<128, 64>, Stages<2>, QueryStages<1>, Pipelines<1>, Splits<1>, ScoreMod::kFullBias>(
        RowNs{2057}, FullNs{1480}, PartialNs{1580}),
};

KernelTable Find(const KernelProblem& problem) {
  const bool bf16 = problem.dtype == DType::kBF16;
  switch (problem.score_mod()) {
    case ScoreMod::kFullBias:
      return bf16 ? kFullBias<__nv_bfloat16> : kFullBias<__half>;
    case ScoreMod::kRelativeBias:
      return bf16 ? kRelativeBias<__nv_bfloat16> : kRelativeBias<__half>;
    default:
      return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
  }
}

}  // namespace
}  // namespace sm90

KernelTable FindSm90D128(const KernelProblem& problem) { return sm90::Find(problem); }

}  // namespace cuda
}  // namespace stof
