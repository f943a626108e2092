// SPDX-License-Identifier: Apache-2.0
// Applies softcap and biases to a tile of scores in the register layout of mma.sync.
#ifndef STOF_CUDA_ATTENTION_SCORE_BIAS_CUH_
#define STOF_CUDA_ATTENTION_SCORE_BIAS_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/attention/params.h"
#include "cuda/attention/relative/params.h"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// tanh(x), with an absolute error of a few last bits of 1.
__device__ __forceinline__ float FastTanh(float x) {
  constexpr float kTwice = 2.0f * kLog2E;
  return 1.0f - 2.0f * Reciprocal(1.0f + Exp2(kTwice * x));
}

// A tile of scores (T: type of the tensors) begins at row0 and key0 and has at most kTileRows rows and 8 kColumns keys.
// A thread holds the scores of rows row0 + row + 16 i + 8 r and keys key0 + key + 8 j + e in s[i][j][2 r + e].
// Reads beyond the tensors are clamped to their last element, and the scores are masked afterwards. Branches around the
// loads are no option: with them, the compiler (13.0) let a warp that skipped all of them run into the next load
// without its memory descriptor. factor: of the relative bias, with kHasFactor.
template <typename T, int kBlocks, int kColumns, bool kHasFactor = false>
class ScoreBiases {
 public:
  __device__ ScoreBiases(const AttentionParams& p, int b, int h, int row0, int key0, int row, int key,
                         const BiasFactor* factor = nullptr)
      : p_(p), b_(b), h_(h), row0_(row0), key0_(key0), row_(row), key_(key), factor_(factor) {}

  // Gives scores in units of log2. A bias of -inf forbids, whatever the mask.
  __device__ __forceinline__ void Add(float scale, float (&s)[kBlocks][kColumns][4]) const {
    const bool capped = p_.softcap > 0.0f;
    const float inner = capped ? scale / p_.softcap : scale;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[i][j][e];
          x *= inner;
          if (capped) x = p_.softcap * (std::is_same<T, float>::value ? tanhf(x) : FastTanh(x));
        }
      }
      AddTo(i, s[i]);
    }
  }

 private:
  __device__ __forceinline__ void AddTo(int i, float (&s)[kColumns][4]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_ + 16 * i + 8 * r;
      float bias[kColumns][2];
      if (p_.bias != nullptr) {
        ReadPairs(min(row0_ + row, p_.S - 1), bias);
      } else {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) bias[j][0] = bias[j][1] = 0.0f;
      }
      if (p_.relative_bias != nullptr) AddDistances(row, bias);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[j][2 * r + e];
          // The lowest finite bias is no mask: it must not become -inf in units of log2.
          const float sum = x + bias[j][e];
          const float score = sum == -INFINITY ? sum : MaxOrNan(sum * kLog2E, kLowestScore);
          x = bias[j][e] == -INFINITY ? -INFINITY : score;
        }
      }
    }
  }

  __device__ __forceinline__ void AddDistances(int row, float (&bias)[kColumns][2]) const {
    const int radius = static_cast<int>(p_.relative_bias_size / 2);
    const float* const middle = p_.relative_bias + h_ * p_.relative_bias_stride_h + radius;
    const int least = key0_ - (p_.query_position + row0_);  // of the tile's first row
    const int own = least + key_ - row;
    if constexpr (kHasFactor) {
      const float factor = FactorOf(min(row0_ + row, p_.S - 1));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) bias[j][e] += factor * middle[max(-radius, min(radius, own + 8 * j + e))];
      }
      return;
    }
    if (least - (kTileRows - 1) >= -radius && least + (8 * kColumns - 1) <= radius) {
      const float* const from = middle + own;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) bias[j][0] += from[8 * j], bias[j][1] += from[8 * j + 1];
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) bias[j][e] += middle[max(-radius, min(radius, own + 8 * j + e))];
      }
    }
  }

  __device__ __forceinline__ float FactorOf(int row) const {
    if (factor_->data == nullptr) return 1.0f;
    const int64_t at = b_ * factor_->stride_b + h_ * factor_->stride_h + row;
    if (std::is_same<T, float>::value || factor_->is_float != 0) return static_cast<const float*>(factor_->data)[at];
    return ToFloat(static_cast<const T*>(factor_->data)[at]);
  }

  __device__ __forceinline__ void ReadPairs(int row, float (&own)[kColumns][2]) const {
    const int64_t at = b_ * p_.bias_stride_b + h_ * p_.bias_stride_h + row * p_.bias_stride_q;
    if (std::is_same<T, float>::value || p_.bias_is_float != 0) {
      ReadPairsOf(static_cast<const float*>(p_.bias) + at, own);
    } else {
      ReadPairsOf(static_cast<const T*>(p_.bias) + at, own);
    }
  }
  // Reads two neighbouring keys at a time where strides and alignment allow.
  template <typename B>
  __device__ __forceinline__ void ReadPairsOf(const B* from, float (&own)[kColumns][2]) const {
    struct alignas(2 * sizeof(B)) Pair {
      B x, y;
    };
    const int64_t odd = (p_.bias_stride_b | p_.bias_stride_h | p_.bias_stride_q) & 1;
    const auto misplaced = reinterpret_cast<uintptr_t>(p_.bias) % sizeof(Pair);
    if (p_.bias_stride_k == 1 && odd == 0 && misplaced == 0 && key0_ + 8 * kColumns <= p_.T) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const Pair pair = *reinterpret_cast<const Pair*>(from + key0_ + key_ + 8 * j);
        own[j][0] = ToFloat(pair.x), own[j][1] = ToFloat(pair.y);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          own[j][e] = ToFloat(from[min(key0_ + key_ + 8 * j + e, p_.T - 1) * p_.bias_stride_k]);
      }
    }
  }

  static constexpr float kLowestScore = -3.4028234663852886e38f;
  const AttentionParams& p_;
  const int b_, h_, row0_, key0_, row_, key_;
  const BiasFactor* const factor_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SCORE_BIAS_CUH_
