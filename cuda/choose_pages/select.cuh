// SPDX-License-Identifier: Apache-2.0
// Selects the largest of many numbers: radix selection by a CTA, whose bins part the range of the numbers that are
// left. So numbers that are close to each other fall into many bins, and two passes are usual. Sums of integers alone:
// every run selects the same ones.
#ifndef STOF_CUDA_CHOOSE_PAGES_SELECT_CUH_
#define STOF_CUDA_CHOOSE_PAGES_SELECT_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace stof {
namespace cuda {

// Numbers above `cut` are selected, and of those that equal it the first `ties`.
struct SelectionCut {
  uint32_t cut;
  int32_t ties;
};

template <int kThreads>
class Selection {
  static constexpr int kWarps = kThreads / 32, kBinBits = 11, kBins = 1 << kBinBits;
  static constexpr int kBinsOfThread = kBins / kThreads;
  static_assert(kBins % kThreads == 0 && kWarps <= 32, "a thread takes bins side by side, a warp adds up the warps");

 public:
  struct Shared {
    int32_t bins[kBins];
    int32_t of_warp[2][32];
    uint32_t extremes[2][32];
    int32_t bin, above, inside;
  };

  // numbers: [count], above 0. wanted: 1 to count - 1. All threads of the CTA call these.
  __device__ Selection(const uint32_t* numbers, int count, Shared& shared)
      : numbers_(numbers), count_(count), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  __device__ SelectionCut FindCut(int wanted) {
    uint32_t low = 0, high = 0;
    FindExtremes(&low, &high);
    for (;;) {
      const int bits = 32 - __clz(high - low), shift = bits > kBinBits ? bits - kBinBits : 0;
      CountBins(low, high, shift);
      FindBin(wanted);
      const int inside = shared_.inside;
      wanted -= shared_.above;
      low += static_cast<uint32_t>(shared_.bin) << shift;
      const uint32_t last = low + ((1u << shift) - 1u);
      high = last < low || last > high ? high : last;
      if (inside == wanted) return {low - 1u, 0};
      if (shift == 0) return {low, wanted};
      __syncthreads();  // all have read what FindBin wrote
    }
  }

  // Calls store(place, i) for each selected number i; places count from 0 in the order of the numbers.
  template <typename Store>
  __device__ void ForEachSelected(const SelectionCut& selected, const Store& store) {
    const int of_warp = ((count_ + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int begin = warp_ * of_warp, end = min(begin + of_warp, count_);
    int above = 0, equal = 0;
    for (int i = begin + lane_; i < end; i += 32) {
      const uint32_t x = numbers_[i];
      above += x > selected.cut ? 1 : 0, equal += x == selected.cut ? 1 : 0;
    }
    above = __reduce_add_sync(~0u, above), equal = __reduce_add_sync(~0u, equal);
    if (lane_ == 0) shared_.of_warp[0][warp_] = above, shared_.of_warp[1][warp_] = equal;
    __syncthreads();
    const bool is_before = lane_ < warp_;
    above = __reduce_add_sync(~0u, is_before ? shared_.of_warp[0][lane_] : 0);
    equal = __reduce_add_sync(~0u, is_before ? shared_.of_warp[1][lane_] : 0);
    const uint32_t below_lane = (1u << lane_) - 1u;
    for (int first = begin; first < end; first += 32) {
      const uint32_t x = first + lane_ < end ? numbers_[first + lane_] : 0u;
      const bool is_there = first + lane_ < end;
      const uint32_t all_above = __ballot_sync(~0u, is_there && x > selected.cut);
      const uint32_t all_equal = __ballot_sync(~0u, is_there && x == selected.cut);
      const int own_above = above + __popc(all_above & below_lane), own_equal = equal + __popc(all_equal & below_lane);
      const bool is_tie = (all_equal >> lane_ & 1u) != 0 && own_equal < selected.ties;
      if ((all_above >> lane_ & 1u) != 0 || is_tie) store(own_above + min(own_equal, selected.ties), first + lane_);
      above += __popc(all_above), equal += __popc(all_equal);
    }
  }

 private:
  __device__ void FindExtremes(uint32_t* low, uint32_t* high) {
    uint32_t least = ~0u, most = 0u;
    for (int i = threadIdx.x; i < count_; i += kThreads) least = min(least, numbers_[i]), most = max(most, numbers_[i]);
    least = __reduce_min_sync(~0u, least), most = __reduce_max_sync(~0u, most);
    if (lane_ == 0) shared_.extremes[0][warp_] = least, shared_.extremes[1][warp_] = most;
    __syncthreads();
    *low = __reduce_min_sync(~0u, lane_ < kWarps ? shared_.extremes[0][lane_] : ~0u);
    *high = __reduce_max_sync(~0u, lane_ < kWarps ? shared_.extremes[1][lane_] : 0u);
  }

  // Counts the numbers of [low, high] by their bin.
  __device__ void CountBins(uint32_t low, uint32_t high, int shift) {
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) shared_.bins[threadIdx.x + i * kThreads] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count_; i += kThreads) {
      const uint32_t x = numbers_[i];
      if (x >= low && x <= high) atomicAdd(&shared_.bins[(x - low) >> shift], 1);
    }
    __syncthreads();
  }

  // Finds the bin that has the wanted-th largest number: sets bin, and the numbers above it and inside.
  __device__ void FindBin(int wanted) {
    // Threads take bins from the last one down.
    const int last = kBins - 1 - static_cast<int>(threadIdx.x) * kBinsOfThread;
    int own = 0;
#pragma unroll
    for (int i = 0; i < kBinsOfThread; ++i) own += shared_.bins[last - i];
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (lane_ >= step) sum += other;
    }
    if (lane_ == 31) shared_.of_warp[0][warp_] = sum;
    __syncthreads();
    int above = sum - own + __reduce_add_sync(~0u, lane_ < warp_ ? shared_.of_warp[0][lane_] : 0);
    if (above < wanted && wanted <= above + own) {
#pragma unroll
      for (int i = 0; i < kBinsOfThread; ++i) {
        const int inside = shared_.bins[last - i];
        if (above < wanted && wanted <= above + inside) {
          shared_.bin = last - i, shared_.above = above, shared_.inside = inside;
        }
        above += inside;
      }
    }
    __syncthreads();
  }

  const uint32_t* const numbers_;
  const int count_;
  Shared& shared_;
  const int warp_, lane_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_SELECT_CUH_
