// SPDX-License-Identifier: Apache-2.0
// Skip by score in a consumer warpgroup of the sm_90a kernels: the vote on a tile, and the counts. Member functions of
// Attention; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_
#define STOF_CUDA_ATTENTION_SM90_SKIP_TILES_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Of a tile that is tested: the test takes registers, and its vote comes before the eager weights anyway.
template <typename S>
struct TestedShape : S {
  static constexpr int kEagerSums = 0, kEagerWeights = S::kEagerSums > 0 ? 8 : 0;
};

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

// Computes a tile that is left out where its scores show that it can be; returns whether it was kept. has_weights: the
// tile before was kept. As the loop of ComputeWorkTile, which has the tiles that are not tested: the tile before those
// is always kept. next: the code of this tile, and then that of the tile behind it.
template <typename S, typename T>
__device__ __forceinline__ bool Sm90Attention<S, T>::ComputeTestedTile(const WorkTileInfo& info, int query,
                                                                       bool has_weights, const Registers& registers,
                                                                       Ring<S::kStages>* keys, Ring<S::kStages>* values,
                                                                       Ring<S::kSlots>* slots, SkipTest<S>* test,
                                                                       SkipRecord* record, int* next, bool* last) {
  const auto& [o, s, weights, bits, row_max, sum] = registers;
  slots->Next();
  Wait(Barrier(kKeyFull, keys->at), keys->phase);
  PingPongWait();
  PinRegisters(s);
  PinRegisters(o);
  PinRegisters(weights);
  WgmmaFence();
  Scores(query, keys->at, s);
  WgmmaCommit();
  if (has_weights) {
    Wait(Barrier(kValueFull, values->at), values->phase);
    WgmmaFence();
    AddValues(values->at, weights, o);
    WgmmaCommit();
  } else {
    WgmmaCommit();  // of nothing, so that the same waits serve both
  }
  PingPongSignal();
  const int code = *next;
  int flags_and_next[2];
  LoadShared(flags_and_next, SharedAddress(&Entries()[slots->at].flags));
  WgmmaWait<1>();
  PinRegisters(s);
  if constexpr (S::kScoreMod) ApplyScoreMod(keys->at, Uniform(flags_and_next[0]), s);
  Release(Barrier(kKeyEmpty, keys->at));
  keys->Next();
  if (code != kFull) ApplyMask(code, Uniform(flags_and_next[0]), slots->at, bits, s);
  const bool kept = TestTile(code, row_max, s, test, record);
  using TestedSoftmax = Softmax<TestedShape<S>>;
  typename TestedSoftmax::EagerWeights eager;
  if (kept) {
    const float base[2] = {TestedSoftmax::SubtractedMax(row_max[0]), TestedSoftmax::SubtractedMax(row_max[1])};
    TestedSoftmax::SubtractMax(scale_, base, s, &eager);
    if (__builtin_expect(TestedSoftmax::MustRaiseMax(row_max, s, eager), 0)) {
      float factor[2];
      TestedSoftmax::template RaiseMax<false>(1.0f, base, s, &eager, row_max, factor, sum);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (info.row0 + row_ + 8 * r >= p_.attention.S) row_max[r] = 0.0f;
      }
      if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) != 0) RescaleOutput(factor, o);
    }
  }
  WgmmaWait<0>();
  PinRegisters(o);
  PinRegisters(weights);
  if (kept) {
    TestedSoftmax::FinishWeights(&eager, s, sum);
    Pack(s, weights);
  }
  // Values that are not added must have come before their buffer is released.
  if (!has_weights) Wait(Barrier(kValueFull, values->at), values->phase);
  Release(Barrier(kValueEmpty, values->at));
  values->Next();
  *next = Uniform(flags_and_next[1]);
  *last = (Uniform(flags_and_next[0]) & kLast) != 0 || (S::kSkipsTiles && MaySkip(TrailingSkips(*next)));
  if (*last) ReleaseQueries(query);
  FetchBits(*next, bits);
  return kept;
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
