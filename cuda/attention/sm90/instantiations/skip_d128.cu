// SPDX-License-Identifier: Apache-2.0
// Kernels that leave out key tiles by their scores. Their costs are those of the kernels that compute all tiles.
#include "cuda/attention/sm90/launch.cuh"

namespace stof {
namespace cuda {
namespace sm90 {
namespace {

template <typename T>
constexpr KernelEntry kKernels[] = {
    MakeKernel<T, Head<128>, Tile<128, 128>, Stages<2>, QueryStages<2>, Pipelines<1>, Splits<1>, ScoreMod::kNone,
               kPingPong, false, kSkipByScore>(RowNs{2184}, FullNs{1373}, PartialNs{1510}, NsPerMib{33}),
    MakeKernel<T, Head<128>, Tile<192, 64>, Stages<4>, QueryStages<1>, Pipelines<1>, Splits<1>, ScoreMod::kNone,
               kPingPong, false, kSkipByScore>(RowNs{3912}, FullNs{941}, PartialNs{1117}),
};

// With softcap, relative bias, or a scale <= 0.
template <typename T>
constexpr KernelEntry kRelativeBias[] = {
    MakeKernel<T, Head<128>, Tile<128, 128>, Stages<2>, QueryStages<2>, Pipelines<1>, Splits<1>,
               ScoreMod::kRelativeBias, false, false, kSkipByScore>(RowNs{2200}, FullNs{1850}, PartialNs{1950}),
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

KernelTable FindSm90SkipD128(const KernelProblem& problem) { return sm90::Find(problem); }

}  // namespace cuda
}  // namespace stof
