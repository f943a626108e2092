// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

template <typename T>
constexpr KernelEntry kKernels[] = {
    MakeKernel<T, Head<64>, Tile<256, 64>, Stages<6>, QueryStages<2>, Pipelines<1>>(RowNs{2516}, FullNs{826},
                                                                                    PartialNs{948}, NsPerMib{71}),
    MakeKernel<T, Head<64>, Tile<128, 64>, Stages<4>, QueryStages<2>, Pipelines<2>, Splits<1>, ScoreMod::kNone,
               kPingPong>(RowNs{1889}, FullNs{911}, PartialNs{1153}, NsPerMib{45}),
    MakeKernel<T, Head<64>, Tile<128, 128>, Stages<4>, QueryStages<2>, Pipelines<1>>(RowNs{1529}, FullNs{1015},
                                                                                     PartialNs{1085}, NsPerMib{207}),
    MakeKernel<T, Head<64>, Tile<64, 64>, Stages<2>, QueryStages<1>, Pipelines<4>, Splits<4>>(
        RowNs{1916}, FullNs{1032}, PartialNs{1126}, NsPerMib{84}),
    MakeKernel<T, Head<64>, Tile<64, 128>, Stages<2>, QueryStages<2>, Pipelines<2>>(
        RowNs{1469}, FullNs{1201}, PartialNs{1301}, NsPerMib{36}, SoloPct{182}),
    MakeKernel<T, Head<64>, Tile<64, 64>, Stages<2>, QueryStages<2>, Pipelines<4>>(
        RowNs{2290}, FullNs{1283}, PartialNs{1283}, NsPerMib{43}, SoloPct{318}),
    MakeKernel<T, Head<64>, Tile<192, 64>, Stages<6>, QueryStages<2>, Pipelines<1>>(RowNs{1753}, FullNs{725},
                                                                                    PartialNs{831}),
    MakeKernel<T, Head<64>, Tile<64, 128>, Stages<2>, QueryStages<1>, Pipelines<2>, Splits<2>>(
        RowNs{1028}, FullNs{1328}, PartialNs{1411}, NsPerMib{68}),
    MakeKernel<T, Head<64>, Tile<192, 128>, Stages<3>, QueryStages<2>, Pipelines<1>>(RowNs{1469}, FullNs{1459},
                                                                                     PartialNs{1569}, NsPerMib{71}),
    MakeKernel<T, Head<64>, Tile<64, 128>, Stages<2>, QueryStages<1>, Pipelines<3>>(
        RowNs{3251}, FullNs{1707}, PartialNs{1754}, NsPerMib{204}, SoloPct{159}),
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr KernelEntry kRelativeBias[] = {
    MakeKernel<T, Head<64>, Tile<192, 64>, Stages<6>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kRelativeBias>(
        RowNs{2600}, FullNs{1207}, PartialNs{1495}),
    MakeKernel<T, Head<64>, Tile<64, 128>, Stages<2>, QueryStages<1>, Pipelines<2>, Splits<2>, ScoreMod::kRelativeBias>(
        RowNs{2240}, FullNs{1680}, PartialNs{2100}),
};

// With these and a full bias.
template <typename T>
constexpr KernelEntry kFullBias[] = {
    MakeKernel<T, Head<64>, Tile<192, 64>, Stages<3>, QueryStages<1>, Pipelines<1>, Splits<1>, ScoreMod::kFullBias>(
        RowNs{2600}, FullNs{1540}, PartialNs{1740}),
    MakeKernel<T, Head<64>, Tile<64, 64>, Stages<2>, QueryStages<1>, Pipelines<2>, Splits<2>, ScoreMod::kFullBias>(
        RowNs{1400}, FullNs{1210}, PartialNs{1410}),
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

KernelTable FindSm90D64(const KernelProblem& problem) { return sm90::Find(problem); }

}  // namespace cuda
}  // namespace stof
