// SPDX-License-Identifier: Apache-2.0
// Kernels that leave out key tiles by their scores. Their costs are those of the kernels that compute all tiles.
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

template <typename T>
constexpr KernelEntry kKernels[] = {
    MakeKernel<T, Head<64>, Tile<256, 64>, Stages<6>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone, false,
               false, kSkipByScore>(RowNs{2516}, FullNs{826}, PartialNs{948}, NsPerMib{71}),
    MakeKernel<T, Head<64>, Tile<192, 64>, Stages<6>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone, false,
               false, kSkipByScore>(RowNs{1753}, FullNs{725}, PartialNs{831}),
    MakeKernel<T, Head<64>, Tile<192, 128>, Stages<3>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone, false,
               false, kSkipByScore>(RowNs{1469}, FullNs{1459}, PartialNs{1569}, NsPerMib{71}),
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr KernelEntry kRelativeBias[] = {
    MakeKernel<T, Head<64>, Tile<192, 64>, Stages<6>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kRelativeBias,
               false, false, kSkipByScore>(RowNs{2600}, FullNs{1207}, PartialNs{1495}),
};

KernelTable Find(const KernelProblem& problem) {
  const bool bf16 = problem.dtype == DType::kBF16;
  switch (problem.score_mod()) {
    case ScoreMod::kFullBias:
      return KernelTable();
    case ScoreMod::kRelativeBias:
      return bf16 ? kRelativeBias<__nv_bfloat16> : kRelativeBias<__half>;
    default:
      return bf16 ? kKernels<__nv_bfloat16> : kKernels<__half>;
  }
}

}  // namespace
}  // namespace sm90

KernelTable FindSm90SkipD64(const KernelProblem& problem) { return sm90::Find(problem); }

}  // namespace cuda
}  // namespace stof
