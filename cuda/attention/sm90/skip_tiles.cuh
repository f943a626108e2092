// SPDX-License-Identifier: Apache-2.0
// Skip by score in a consumer warpgroup of the sm_90a kernels: the vote on a tile, and the counts. Member functions of
// Attention; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_
#define STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Whether the warpgroup keeps a tile, by its scores before they are scaled.
template <typename S, typename T>
__device__ __forceinline__ bool Sm90Attention<S, T>::TestTile(int code, const float (&row_max)[2],
                                                              const float (&s)[kScores], SkipTest<S>* test,
                                                              SkipRecord* record) const {
  if (AnyOfWarpgroup(test->Keeps(scale_, row_max, s))) {
    test->Raise();
    record->Keep();
    return true;
  }
  record->Skip();
  if (code != kFull && !AnyOfWarpgroup(test->HasPair())) record->Discount();
  return false;
}

// Adds the tiles of a work tile to the counts: pairs of its queries and their keys.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::CountTiles(const WorkTileInfo& info,
                                                                const SkipRecord& record) const {
  if (p_.skip_counts == nullptr || threadIdx.x % kWarpgroup != 0) return;
  const int pairs = max(0, min(64, p_.attention.S - info.row0 - 64 * wg_)) * S::kN;
  atomicAdd(p_.skip_counts, static_cast<unsigned long long>(record.scored()) * pairs);
  if (record.skipped() > 0) {
    atomicAdd(p_.skip_counts + 1, static_cast<unsigned long long>(record.skipped()) * pairs);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_
