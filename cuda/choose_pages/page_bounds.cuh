// SPDX-License-Identifier: Apache-2.0
// The key bounds of one page: for each element of a head the minimum and the maximum of its keys.
#ifndef STOF_CUDA_CHOOSE_PAGES_PAGE_BOUNDS_CUH_
#define STOF_CUDA_CHOOSE_PAGES_PAGE_BOUNDS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/mma_sm80.cuh"
#include "cuda/common/round.cuh"

namespace stof {
namespace cuda {

// NaN where x or y is NaN.
__device__ __forceinline__ float MinOrNan(float x, float y) { return -MaxOrNan(-x, -y); }

// kElements elements that are loaded and stored at once.
template <typename T, int kElements>
struct alignas(sizeof(T) * kElements) BoundsPiece {
  T at[kElements];
};

// A CTA computes the key bounds of a page. Threads side by side take pieces of a row, and every so many rows; those of
// these are combined in shared memory.
template <typename T, int kElements, int kThreads>
class PageBoundsOf {
  using Piece = BoundsPiece<T, kElements>;

 public:
  struct Shared {
    float least[kThreads][kElements], most[kThreads][kElements];
  };

  // rows: [count, D], their distance in elements `stride`; count is at least 1. to: [2, D]. All threads of the CTA call
  // it.
  static __device__ void Compute(const T* rows, int64_t stride, int count, int D, T* to, Shared& shared) {
    constexpr int kAtOnce = 4;  // loads that a thread has in flight
    const int pieces = D / kElements, down = kThreads / pieces;
    const int piece = static_cast<int>(threadIdx.x) % pieces, first = static_cast<int>(threadIdx.x) / pieces;
    float least[kElements], most[kElements];
#pragma unroll
    for (int e = 0; e < kElements; ++e) least[e] = INFINITY, most[e] = -INFINITY;
    for (int row = first; row < count && first < down; row += down * kAtOnce) {
      Piece held[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        // Rows behind the last one repeat it.
        held[n] = *reinterpret_cast<const Piece*>(rows + min(row + n * down, count - 1) * stride + piece * kElements);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          const float x = ToFloat(held[n].at[e]);
          least[e] = MinOrNan(least[e], x), most[e] = MaxOrNan(most[e], x);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      shared.least[threadIdx.x][e] = least[e], shared.most[threadIdx.x][e] = most[e];
    }
    __syncthreads();
    // Threads without a row have stored the neutral elements.
    for (int d = threadIdx.x; d < D; d += kThreads) {
      float low = INFINITY, high = -INFINITY;
      for (int n = 0; n < down; ++n) {
        const int from = n * pieces + d / kElements;
        low = MinOrNan(low, shared.least[from][d % kElements]);
        high = MaxOrNan(high, shared.most[from][d % kElements]);
      }
      to[d] = Round<T>(low), to[D + d] = Round<T>(high);
    }
  }
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_PAGE_BOUNDS_CUH_
