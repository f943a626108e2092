// SPDX-License-Identifier: Apache-2.0
// Adds the relative terms of a tile of scores, in the registers of a warp that computes them by mma.sync.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_
#define STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/attention/relative/band.h"
#include "cuda/attention/relative/params.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Scores of a warp: kBlocks blocks of 16 queries from `row` on, and 64 keys from `key` on. Element e of s[i][j] is of
// query row + 16 i + lane / 4 + 8 (e / 2) and key + 8 j + 2 (lane % 4) + e % 2.
template <typename T, int kHead, int kBlocks>
class RelativeProducts {
  static constexpr int kColumns = kTileKeys / 8;
  static constexpr int kPairs = kHead / 32;  // pairs of k-steps
  // Pairs of blocks of 8 expanded rows that the warp's queries read. Block i of queries begins kBlocks - 1 - i pairs
  // behind the first.
  static constexpr int kWindow = kBandPairs + kBlocks - 1;
  // More k-steps at a time would need more registers than there are.
  static constexpr int kAtOnce = kHead <= 128 ? kPairs : 1;

 public:
  using Scores = float[kBlocks][kColumns][4];

  __device__ __forceinline__ RelativeProducts(const AttentionParams& p, int b, int h, int row, int key, int lane)
      : p_(p), b_(b), h_(h), row_(row), key_(key), lane_(lane) {}

  // Products of queries and expanded rows. read_queries(k, q) sets q[kBlocks][4] to the fragments of k-step k.
  template <typename ReadQueries>
  __device__ __forceinline__ void AddQueryBand(const BandTerm& term, ReadQueries read_queries, Scores& s) const {
    const uint32_t* const rows = Rows(term);
    const float* const column = Column(term) + 2 * (lane_ % 4);
    const QuerySkew skew(lane_);
    float older[kBlocks][2][4], newer[kBlocks][2][4];  // of two neighbouring pairs
#pragma unroll
    for (int u = 0; u < kWindow; ++u) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 start = *reinterpret_cast<const float2*>(column + 16 * u + 8 * n);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          newer[i][n][0] = newer[i][n][2] = start.x;
          newer[i][n][1] = newer[i][n][3] = start.y;
        }
      }
#pragma unroll kAtOnce
      for (int k = 0; k < kPairs; ++k) {
        uint32_t x[4], y[4];
        LoadConstant(x, rows + 4 * FragmentIndex(2 * u, k, kPairs, 0));
        LoadConstant(y, rows + 4 * FragmentIndex(2 * u + 1, k, kPairs, 0));
        uint32_t q[kBlocks][4];
        read_queries(2 * k, q);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (!IsOfBand(i, u)) continue;
          Mma<T>(newer[i][0], q[i], x[0], x[1]);
          Mma<T>(newer[i][1], q[i], y[0], y[1]);
        }
        read_queries(2 * k + 1, q);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (!IsOfBand(i, u)) continue;
          Mma<T>(newer[i][0], q[i], x[2], x[3]);
          Mma<T>(newer[i][1], q[i], y[2], y[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (!IsOfBand(i, u)) continue;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          skew.Order(&newer[i][n][0], &newer[i][n][1]);
          skew.Order(&newer[i][n][2], &newer[i][n][3]);
        }
        const int pair = u - (kBlocks - 1 - i);  // of the block's band
        if (pair > 0) AddSkewed(skew, older[i], newer[i], s[i], 2 * (pair - 1));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) older[i][n][e] = newer[i][n][e];
        }
      }
    }
  }

  // Products of keys and expanded rows. read_keys(k, j, b) sets b[4] to the fragments of k-step k and of blocks j and
  // j + 1 of 8 keys.
  template <typename ReadKeys>
  __device__ __forceinline__ void AddKeyBand(const BandTerm& term, ReadKeys read_keys, Scores& s) const {
    const uint32_t* const rows = Rows(term);
    const float* const column = Column(term) + lane_ / 4;
    const KeySkew skew(lane_);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      // Of pairs j / 2 to j / 2 + kBlocks of expanded rows, and both blocks of keys.
      float z[kBlocks + 1][2][4];
#pragma unroll
      for (int u = 0; u <= kBlocks; ++u) {
        const float low = column[8 * (j + 2 * u)], high = column[8 * (j + 2 * u) + 8];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          z[u][n][0] = z[u][n][1] = low;
          z[u][n][2] = z[u][n][3] = high;
        }
      }
#pragma unroll kAtOnce
      for (int k = 0; k < kPairs; ++k) {
        uint32_t low[4], high[4];  // keys of two k-steps
        read_keys(2 * k, j, low);
        read_keys(2 * k + 1, j, high);
#pragma unroll
        for (int u = 0; u <= kBlocks; ++u) {
          uint32_t x[4], y[4];
          LoadConstant(x, rows + 4 * FragmentIndex(j + 2 * u, k, kPairs, 0));
          LoadConstant(y, rows + 4 * FragmentIndex(j + 2 * u + 1, k, kPairs, 0));
          const uint32_t a[4] = {x[0], y[0], x[1], y[1]}, c[4] = {x[2], y[2], x[3], y[3]};
          Mma<T>(z[u][0], a, low[0], low[1]);
          Mma<T>(z[u][1], a, low[2], low[3]);
          Mma<T>(z[u][0], c, high[0], high[1]);
          Mma<T>(z[u][1], c, high[2], high[3]);
        }
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int u = kBlocks - 1 - i;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            // Blocks of the band from j on, the first one for query g + 8.
            const int first = n + 1 - r, next = first + 1;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float sent = skew.Send(e, z[u + first / 2][n][first % 2 * 2 + e], z[u + next / 2][n][next % 2 * 2 + e]);
              s[i][j + n][2 * r + e] += __shfl_sync(~0u, sent, skew.source[e]);
            }
          }
        }
      }
    }
  }

  // Products by parts of positions. of_keys: they are those of keys. Pairs beyond the tensors read those of the last
  // query or key, and are masked afterwards.
  __device__ __forceinline__ void AddParts(const PartTerm& term, bool of_keys, Scores& s) const {
    const int64_t head = static_cast<int64_t>(b_) * p_.H + h_;
    const float* const products = term.products + head * (of_keys ? p_.T : p_.S) * term.columns + term.offset;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(row_ + 16 * i + lane_ / 4 + 8 * r, p_.S - 1);
        const float* const own = products + (of_keys ? 0 : static_cast<int64_t>(row) * term.columns) - term.query_part[row];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = min(key_ + 8 * j + lane_ % 4 * 2 + e, p_.T - 1);
            s[i][j][2 * r + e] += own[(of_keys ? static_cast<int64_t>(key) * term.columns : 0) + term.key_part[key]];
          }
        }
        __syncwarp();  // loads of all rows at once would need more registers than there are
      }
    }
  }

 private:
  // Whether block i of queries reads pair u of the warp's expanded rows.
  static __device__ constexpr bool IsOfBand(int i, int u) { return u >= kBlocks - 1 - i && u < kBandPairs + kBlocks - 1 - i; }

  __device__ __forceinline__ int First() const { return BandBegin(row_ + 16 * (kBlocks - 1), key_, p_.S); }
  __device__ __forceinline__ const uint32_t* Rows(const BandTerm& term) const {
    return reinterpret_cast<const uint32_t*>(static_cast<const T*>(term.rows) + h_ * term.row_stride_h) +
           4 * FragmentIndex(First() / 8, 0, kPairs, lane_);
  }
  __device__ __forceinline__ const float* Column(const BandTerm& term) const {
    return term.column + h_ * term.column_stride_h + First();
  }

  // Adds two pairs of ordered blocks to blocks j and j + 1 of the scores.
  __device__ __forceinline__ void AddSkewed(const QuerySkew& skew, const float (&older)[2][4], const float (&newer)[2][4],
                                            float (&s)[kColumns][4], int j) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int first = n + 1 - r, next = first + 1;
        const float* const x = first < 2 ? older[first] : newer[first - 2];
        const float* const y = next < 2 ? older[next] : newer[next - 2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[j + n][2 * r + e] += __shfl_sync(~0u, skew.Send(e, x[2 * r + e], y[2 * r + e]), skew.source[e]);
        }
      }
    }
  }

  const AttentionParams& p_;
  const int b_, h_, row_, key_, lane_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_
