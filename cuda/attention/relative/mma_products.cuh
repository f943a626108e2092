// SPDX-License-Identifier: Apache-2.0
// Products of queries or keys and expanded rows by mma.sync, in fp16 and bf16.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_MMA_PRODUCTS_CUH_
#define STOF_CUDA_ATTENTION_RELATIVE_MMA_PRODUCTS_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/relative/products.cuh"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// The lane's fragments of a window in global memory. Read(u, i, r) sets r to fragment i of pair u: fragments are in the
// order of memory, head size / 16 a pair.
template <int kHead>
class GlobalWindow {
 public:
  // first: as WindowRows gives.
  __device__ __forceinline__ explicit GlobalWindow(const uint32_t* first) : first_(first) {}
  __device__ __forceinline__ void Read(int u, int i, uint32_t (&r)[4]) const {
    LoadConstant(r, first_ + 4 * FragmentIndex(u, i, kHead / 16, 0));
  }

 private:
  const uint32_t* const first_;
};

// The same in a ring of kPairs pairs in shared memory (band.h).
template <int kHead, int kPairs>
class RingWindow {
 public:
  __device__ __forceinline__ RingWindow(uint32_t ring, int first, int lane)
      : ring_(ring + 16 * static_cast<uint32_t>(lane)), first_(RingPair<kPairs>(first)) {}
  __device__ __forceinline__ void Read(int u, int i, uint32_t (&r)[4]) const {
    const uint32_t pair = NextInRing<kPairs>(first_ + static_cast<uint32_t>(u));
    LoadShared(r, ring_ + pair * (2 * kBandQueries * kHead) + 512 * static_cast<uint32_t>(i));
  }

 private:
  const uint32_t ring_, first_;
};

// Products of 16 kBlocks queries and a pair of blocks of expanded rows. read_queries(k, q) sets q to the fragments of
// k-step k.
template <typename T, int kHead, int kBlocks, typename Rows, typename ReadQueries>
__device__ __forceinline__ void MultiplyQueries(const Rows& rows, int u, ReadQueries read_queries,
                                                float (&x)[kBlocks][2][4]) {
  using Scores = RelativeScores<kBlocks>;
  constexpr int kPairs = kHead / 32, kAtOnce = kHead <= 128 ? kPairs : 1;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.0f;
  }
#pragma unroll kAtOnce
  for (int k = 0; k < kPairs; ++k) {
    uint32_t low[4], high[4], q[kBlocks][4];
    rows.Read(u, k, low);
    rows.Read(u, kPairs + k, high);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      read_queries(2 * k + step, q);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (!Scores::IsOfBand(i, u)) continue;
        Mma<T>(x[i][0], q[i], low[2 * step], low[2 * step + 1]);
        Mma<T>(x[i][1], q[i], high[2 * step], high[2 * step + 1]);
      }
    }
  }
}

// Products of kBlocks + 1 pairs of blocks of expanded rows, from block j on, and of blocks j and j + 1 of 8 keys.
// read_keys(k, j, b) sets b to the fragments of k-step k; with_keys(k, j, b) is called with them. Neighbouring blocks
// of keys share pairs, which the compiler keeps in registers.
template <typename T, int kHead, int kBlocks, typename Rows, typename ReadKeys, typename WithKeys>
__device__ __forceinline__ void MultiplyKeys(const Rows& rows, int j, ReadKeys read_keys, WithKeys with_keys,
                                             float (&z)[kBlocks + 1][2][4]) {
  constexpr int kSteps = kHead / 16, kAtOnce = kHead <= 128 ? kSteps : 2;
#pragma unroll
  for (int u = 0; u <= kBlocks; ++u) {
#pragma unroll
    for (int n = 0; n < 2; ++n) z[u][n][0] = z[u][n][1] = z[u][n][2] = z[u][n][3] = 0.0f;
  }
#pragma unroll kAtOnce
  for (int k = 0; k < kSteps; ++k) {
    uint32_t keys[4];
    read_keys(k, j, keys);
#pragma unroll
    for (int u = 0; u <= kBlocks; ++u) {
      uint32_t a[4];
      rows.Read(j / 2 + u, k, a);
      Mma<T>(z[u][0], a, keys[0], keys[1]);
      Mma<T>(z[u][1], a, keys[2], keys[3]);
    }
    with_keys(k, j, keys);
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_MMA_PRODUCTS_CUH_
