// SPDX-License-Identifier: Apache-2.0
// Skip by score in a consumer warpgroup of the sm_90a kernels: the vote on a tile, and the counts. Member functions of
// Attention; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_
#define STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Whether the warpgroup keeps a tile. Scores are less `base`. Raises the row max first where it must.
template <typename S, typename T>
__device__ __forceinline__ bool Sm90Attention<S, T>::TestTile(const bool (&is_row)[2], const float (&base)[2],
                                                              float (&s)[kScores],
                                                              typename RowSoftmax::EagerWeights* eager,
                                                              float (&row_max)[2], float (&sum)[2],
                                                              float (&o)[kOutputs], SkipTest<S>* test) const {
  int32_t tops[2];
  SkipTest<S>::FindTops(s, tops);
  const bool known = RowSoftmax::IsNear(row_max);
  if (__builtin_expect(__any_sync(~0u, !known || test->Exceeds(tops)), 0)) {
    if (__any_sync(~0u, !known || test->ExceedsSlack(tops)) != 0) {
      float factor[2], excess[2];
      bool raised[2];
      RowSoftmax::template RaiseMax<false>(1.0f, base, s, eager, row_max, factor, sum, excess, raised, test->slack());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!is_row[r]) row_max[r] = 0.0f;
      }
      test->Raise(excess, raised);
      if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) != 0) RescaleOutput(factor, o);
    } else {
      test->Raise(tops);
    }
    test->SetLimits(row_max, is_row);
  }
  return __any_sync(~0u, AnyNamed(OwnBarrier(), kWarpgroup, test->Keeps(s))) != 0;
}

// Adds the tiles of a work tile to the counts: pairs of its queries and their keys.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::CountTiles(const WorkTileInfo& info, int tiles,
                                                                int skipped) const {
  if (p_.skip_counts == nullptr || threadIdx.x % kWarpgroup != 0) return;
  const int rows = max(0, min(64, p_.attention.S - info.row0 - 64 * wg_));
  atomicAdd(p_.skip_counts, static_cast<unsigned long long>(tiles) * (rows * S::kN));
  if (skipped > 0) atomicAdd(p_.skip_counts + 1, static_cast<unsigned long long>(skipped) * (rows * S::kN));
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_
