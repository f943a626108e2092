// SPDX-License-Identifier: Apache-2.0
// Products of queries or keys and expanded rows in fp32: every number is the sum of two fp16 values, as in
// cuda/attention/fp32/. Fragments of an expanded row are those of its high parts, then those of its low parts.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_SPLIT_PRODUCTS_CUH_
#define STOF_CUDA_ATTENTION_RELATIVE_SPLIT_PRODUCTS_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/relative/products.cuh"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Factors that products are multiplied by, and what is added to them behind that.
struct BandScale {
  const float* factor;  // of expanded rows, from the first one of the window on
  const float* row_bias;
  float scale;  // of scores
};

// Products of 16 kBlocks queries and a pair of blocks of expanded rows. read_queries(k, high, low) sets the fragments
// of k-step k. row_scale: the factors of the lane's queries, times that of scores.
template <typename T, int kHead, int kBlocks, typename ReadQueries>
__device__ __forceinline__ void MultiplySplitQueries(const uint32_t* rows, const BandScale& by, int u, int lane,
                                                     const float (&row_scale)[kBlocks][2], ReadQueries read_queries,
                                                     float (&x)[kBlocks][2][4]) {
  using Scores = RelativeScores<kBlocks>;
  constexpr int kPairs = kHead / 32;
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int n = 0; n < 2; ++n) x[i][n][0] = x[i][n][1] = x[i][n][2] = x[i][n][3] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < kPairs; ++k) {
    uint32_t high[2][4], low[2][4];  // of both blocks
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      LoadConstant(high[n], rows + 4 * FragmentIndex(2 * u + n, 2 * k, 2 * kPairs, 0));
      LoadConstant(low[n], rows + 4 * FragmentIndex(2 * u + n, 2 * k + 1, 2 * kPairs, 0));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t top[kBlocks][4], rest[kBlocks][4];
      read_queries(2 * k + step, top, rest);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (!Scores::IsOfBand(i, u)) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Mma<T>(x[i][n], rest[i], high[n][2 * step], high[n][2 * step + 1]);
          Mma<T>(x[i][n], top[i], low[n][2 * step], low[n][2 * step + 1]);
          Mma<T>(x[i][n], top[i], high[n][2 * step], high[n][2 * step + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int at = 16 * u + 8 * n + 2 * (lane % 4);
    const float2 factor = *reinterpret_cast<const float2*>(by.factor + at);
    const float2 row_bias = *reinterpret_cast<const float2*>(by.row_bias + at);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float* const pair = x[i][n] + 2 * r;
        pair[0] = pair[0] * factor.x * row_scale[i][r] + row_bias.x * by.scale;
        pair[1] = pair[1] * factor.y * row_scale[i][r] + row_bias.y * by.scale;
      }
    }
  }
}

// Products of kBlocks + 1 pairs of blocks of expanded rows, from block j on, and of blocks j and j + 1 of 8 keys.
// read_keys(k, j, high, low) sets the fragments of k-step k. key_factors: of the 64 keys.
template <typename T, int kHead, int kBlocks, typename ReadKeys>
__device__ __forceinline__ void MultiplySplitKeys(const uint32_t* rows, const BandScale& by, int j, int lane,
                                                  const float* key_factors, ReadKeys read_keys,
                                                  float (&z)[kBlocks + 1][2][4]) {
  constexpr int kPairs = kHead / 32;
#pragma unroll
  for (int u = 0; u <= kBlocks; ++u) {
#pragma unroll
    for (int n = 0; n < 2; ++n) z[u][n][0] = z[u][n][1] = z[u][n][2] = z[u][n][3] = 0.0f;
  }
#pragma unroll 1
  for (int k = 0; k < kPairs; ++k) {
    uint32_t top[2][4], rest[2][4];
#pragma unroll
    for (int step = 0; step < 2; ++step) read_keys(2 * k + step, j, top[step], rest[step]);
#pragma unroll
    for (int u = 0; u <= kBlocks; ++u) {
      uint32_t high[2][4], low[2][4];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        LoadConstant(high[n], rows + 4 * FragmentIndex(j + 2 * u + n, 2 * k, 2 * kPairs, 0));
        LoadConstant(low[n], rows + 4 * FragmentIndex(j + 2 * u + n, 2 * k + 1, 2 * kPairs, 0));
      }
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t a[4] = {high[0][2 * step], high[1][2 * step], high[0][2 * step + 1], high[1][2 * step + 1]};
        const uint32_t c[4] = {low[0][2 * step], low[1][2 * step], low[0][2 * step + 1], low[1][2 * step + 1]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          Mma<T>(z[u][n], c, top[step][2 * n], top[step][2 * n + 1]);
          Mma<T>(z[u][n], a, rest[step][2 * n], rest[step][2 * n + 1]);
          Mma<T>(z[u][n], a, top[step][2 * n], top[step][2 * n + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 key = *reinterpret_cast<const float2*>(key_factors + 8 * (j + n) + 2 * (lane % 4));
#pragma unroll
    for (int u = 0; u <= kBlocks; ++u) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int at = 8 * (j + 2 * u + r) + lane / 4;
        const float factor = by.factor[at], row_bias = by.row_bias[at] * by.scale;
        float* const pair = z[u][n] + 2 * r;
        pair[0] = pair[0] * factor * key.x * by.scale + row_bias;
        pair[1] = pair[1] * factor * key.y * by.scale + row_bias;
      }
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_SPLIT_PRODUCTS_CUH_
