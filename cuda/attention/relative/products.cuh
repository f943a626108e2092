// SPDX-License-Identifier: Apache-2.0
// Adds the relative terms of a tile of scores, in the registers of a warp that computes them by mma.sync.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_
#define STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/attention/relative/band.h"
#include "cuda/attention/relative/params.h"

namespace stof {
namespace cuda {

// Scores of a warp: kBlocks blocks of 16 queries from `row` on, and 64 keys from `key` on. Element e of s[i][j] is of
// query row + 16 i + lane / 4 + 8 (e / 2) and key + 8 j + 2 (lane % 4) + e % 2.
template <int kBlocks>
class RelativeScores {
  static constexpr int kColumns = kTileKeys / 8;

 public:
  using Scores = float[kBlocks][kColumns][4];
  // Pairs of blocks of 8 expanded rows that the warp's queries read. Block i of queries begins kBlocks - 1 - i pairs
  // behind the first.
  static constexpr int kWindow = kBandPairs + kBlocks - 1;
  // Whether block i of queries reads pair u.
  static __device__ constexpr bool IsOfBand(int i, int u) {
    return u >= kBlocks - 1 - i && u < kBandPairs + kBlocks - 1 - i;
  }

  __device__ __forceinline__ RelativeScores(const AttentionParams& p, int b, int h, int row, int key, int lane)
      : p_(p), b_(b), h_(h), row_(row), key_(key), lane_(lane) {}

  // The first expanded row of the window.
  __device__ __forceinline__ int First() const { return BandBegin(row_ + 16 * (kBlocks - 1), key_, p_.S); }

  // Adds products of queries and expanded rows. multiply(u, x) sets x[i][n] to those of block i of queries and block 2
  // u + n of the window, where IsOfBand(i, u).
  template <typename Multiply>
  __device__ __forceinline__ void AddQueryBand(Multiply multiply, Scores& s) const {
    const QuerySkew skew(lane_);
    float older[kBlocks][2][4], newer[kBlocks][2][4];  // of two neighbouring pairs
#pragma unroll
    for (int u = 0; u < kWindow; ++u) {
      multiply(u, newer);
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

  // Adds products of keys and expanded rows. multiply(j, z) sets z[u][n] to those of blocks j + 2 u and j + 2 u + 1 of
  // the window, as rows, and of block j + n of 8 keys.
  template <typename Multiply>
  __device__ __forceinline__ void AddKeyBand(Multiply multiply, Scores& s) const {
    const KeySkew skew(lane_);
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      float z[kBlocks + 1][2][4];
      multiply(j, z);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int u = kBlocks - 1 - i;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int first = n + 1 - r, next = first + 1;  // blocks of the band from j on
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float sent =
                  skew.Send(e, z[u + first / 2][n][first % 2 * 2 + e], z[u + next / 2][n][next % 2 * 2 + e]);
              s[i][j + n][2 * r + e] += __shfl_sync(~0u, sent, skew.source[e]);
            }
          }
        }
      }
    }
  }

  // Adds the row bias of a window.
  __device__ __forceinline__ void AddRowBias(const float* row_bias, Scores& s) const {
    const float* const own = row_bias + lane_ % 4 * 2 - lane_ / 4;
    constexpr int kDiagonals = kColumns + 2 * kBlocks - 1;  // of blocks of 8 queries and 8 keys
#pragma unroll
    for (int d = 0; d < kDiagonals; ++d) {
      const float of_pair[2] = {own[8 * (d + 1)], own[8 * (d + 1) + 1]};
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int block = j + 2 * kBlocks - 1 - d;  // of queries
        if (block < 0 || block >= 2 * kBlocks) continue;
#pragma unroll
        for (int e = 0; e < 2; ++e) s[block / 2][j][block % 2 * 2 + e] += of_pair[e];
      }
      if (d % 4 == 3) __syncwarp();  // loads of all blocks at once would need more registers than there are
    }
  }

  // Adds `factor` times products by parts of positions. of_keys: they are those of keys. Pairs beyond the tensors read
  // those of the last query or key, and are masked afterwards.
  __device__ __forceinline__ void AddParts(const PartTerm& term, bool of_keys, float factor, Scores& s) const {
    const int64_t head = static_cast<int64_t>(b_) * p_.H + h_;
    const float* const products = term.products + head * (of_keys ? p_.T : p_.S) * term.columns + term.offset;
    const float* of_query[kBlocks][2];  // products of the lane's queries; of keys: those of any key
    int query_part[kBlocks][2];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(row_ + 16 * i + lane_ / 4 + 8 * r, p_.S - 1);
        query_part[i][r] = term.query_part[row];
        of_query[i][r] = products + static_cast<int64_t>(row) * term.columns - query_part[i][r];
      }
    }
    if (!of_keys) {
      // The keys of a tile may have one part, as those of a row of a grid do: then a row has one product.
      const int first = term.key_part[min(key_, p_.T - 1)];
      const bool is_one = term.key_part[min(key_ + lane_, p_.T - 1)] == first &&
                          term.key_part[min(key_ + lane_ + 32, p_.T - 1)] == first;
      if (__all_sync(~0u, is_one) != 0) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float product = of_query[i][r][first];
#pragma unroll
            for (int j = 0; j < kColumns; ++j) {
#pragma unroll
              for (int e = 0; e < 2; ++e) s[i][j][2 * r + e] = fmaf(factor, product, s[i][j][2 * r + e]);
            }
          }
        }
        return;
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = min(key_ + 8 * j + lane_ % 4 * 2 + e, p_.T - 1);
        const int key_part = term.key_part[key];
        const float* const of_key = products + static_cast<int64_t>(key) * term.columns + key_part;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float product = of_keys ? of_key[-query_part[i][r]] : of_query[i][r][key_part];
            s[i][j][2 * r + e] = fmaf(factor, product, s[i][j][2 * r + e]);
          }
        }
      }
      if (j % 2 != 0) __syncwarp();  // more loads at once would need more registers than there are
    }
  }

 private:
  // Adds two pairs of ordered blocks to blocks j and j + 1 of the scores.
  __device__ __forceinline__ void AddSkewed(const QuerySkew& skew, const float (&older)[2][4],
                                            const float (&newer)[2][4], float (&s)[kColumns][4], int j) const {
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

// The lane's fragments of the first block of a window (band.h). kPairs: fragments of a row, a lane.
template <int kPairs>
__device__ __forceinline__ const uint32_t* WindowRows(const BandTerm& term, int h, int first, int lane) {
  return reinterpret_cast<const uint32_t*>(static_cast<const char*>(term.rows) + h * term.row_stride_h) +
         4 * FragmentIndex(first / 8, 0, kPairs, lane);
}
__device__ __forceinline__ const float* WindowRowBias(const BandTerm& term, int h, int first) {
  return term.row_bias + h * term.row_bias_stride_h + first;
}
__device__ __forceinline__ const float* WindowFactor(const BandTerm& term, int h, int first) {
  return term.factor + h * term.row_bias_stride_h + first;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_PRODUCTS_CUH_
