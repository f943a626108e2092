// SPDX-License-Identifier: Apache-2.0
// One KV tile of the fp32 kernel: scores, biases and mask, online softmax, P V. Member functions of Fp32Attention,
// whose registers they use; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_FP32_STEP_CUH_
#define STOF_CUDA_ATTENTION_FP32_STEP_CUH_

#include "cuda/attention/fp32/kernel.cuh"

namespace stof {
namespace cuda {

// c = a · b if `first`, else c += a · b; `first` is a compile-time constant.
__device__ __forceinline__ void MmaOrSet(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool first) {
  if (!first) return Mma<__half>(c, a, b0, b1);
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
      "%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::Scores(
    int tile, const char* stage, float (&s)[S::kBlocks][kColumns][4]) {
  const int row = warp_ * S::kBlocks * 16 + lane_ % 16;
  const uint32_t query = SharedAddress(Queries() + SwizzledOffset<kHead>(row, lane_ / 16));
  const uint32_t key = SharedAddress(stage) + 2 * SwizzledOffset<kHead>(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t high[S::kBlocks][4], low[S::kBlocks][4];
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const uint32_t at = ChunkAddress<kHead>(query, 2 * k) + 2 * 16 * i * kHead;
      LoadMatrix4(high[i], at);
      if constexpr (kPlanes == 2) LoadMatrix4(low[i], at + 2 * S::kM * kHead);
    }
#pragma unroll
    for (int j = 0; j < kColumns; j += kGroup) {
      uint32_t top[kGroup / 2][4], rest[kGroup / 2][4];
#pragma unroll
      for (int n = 0; n < kGroup / 2; ++n) {
        const uint32_t at = ChunkAddress<kHead>(key, 2 * k) + 2 * (8 * j + 16 * n) * kHead;
        LoadMatrix4(top[n], at);
        if constexpr (kPlanes == 2) LoadMatrix4(rest[n], at + 2 * S::kPlane);
      }
      if constexpr (kPlanes == 2) {
        MmaGroup(s, j, low, top, k == 0);
        MmaGroup(s, j, high, rest, false);
      }
      MmaGroup(s, j, high, top, kPlanes == 1 && k == 0);
    }
  }
  const auto* factors = reinterpret_cast<const float*>(stage + S::kValueBytes);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + lane_ % 4 * 2);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Two multiplications: the product of the factors may exceed fp32 where the score does not. And rounded, so
        // that no later subtraction is fused.
        s[i][j][2 * r] = __fmul_rn(s[i][j][2 * r] * factor.x, scale_[i][r]);
        s[i][j][2 * r + 1] = __fmul_rn(s[i][j][2 * r + 1] * factor.y, scale_[i][r]);
      }
    }
  }
  if constexpr (kRelative) AddRelativeTerms(tile, stage, s);
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::MmaGroup(
    float (&s)[S::kBlocks][kColumns][4], int j, const uint32_t (&a)[S::kBlocks][4], const uint32_t (&b)[kGroup / 2][4],
    bool first) {
#pragma unroll
  for (int n = 0; n < kGroup / 2; ++n) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      MmaOrSet(s[i][j + 2 * n], a[i], b[n][0], b[n][1], first);
      MmaOrSet(s[i][j + 2 * n + 1], a[i], b[n][2], b[n][3], first);
    }
  }
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::ApplyMaskAndBias(
    const KvTile& entry, const Bits& bits, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
  if constexpr (kScoreMod && kRelative) {
    ScoreBiases<float, S::kBlocks, kColumns, true>(p_, b_, h_, row0_, entry.tile * S::kN, Row(0, 0), lane_ % 4 * 2,
                                                   &this->relative.factor)
        .Add(1.0f, s);
  } else if constexpr (kScoreMod) {
    ScoreBiases<float, S::kBlocks, kColumns>(p_, b_, h_, row0_, entry.tile * S::kN, Row(0, 0), lane_ % 4 * 2)
        .Add(1.0f, s);
  }
  if (unmasked && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kMean) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
      }
    }
  }
  if (!Bits::Some(entry.bits, entry.pad)) return;
  bits.Forbid(entry.bits, entry.pad, lane_, s);
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::Softmax(
    float (&s)[S::kBlocks][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) high = fmaxf(high, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float old = max_[i][r];
      if (high - old > kSlack) {  // not in a sum, which far from zero would be rounded
        const float factor = old == -INFINITY ? 0.0f : Exp2(old - high);
        max_[i][r] = high;
        sum_[i][r] *= factor;
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) o_[i][j][2 * r] *= factor, o_[i][j][2 * r + 1] *= factor;
      }
      const float base = max_[i][r] == -INFINITY ? 0.0f : max_[i][r];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          s[i][j][e] = Exp2(s[i][j][e] - base);
          sum_[i][r] += s[i][j][e];
        }
      }
    }
  }
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__device__ __forceinline__ void Fp32Attention<kHead, kPlanes, kTile, kScoreMod, kRelative>::AddValues(
    const __half* values, float factor, const float (&s)[S::kBlocks][kColumns][4]) {
  constexpr int kParts = S::kN / 16;
  uint32_t high[kParts][S::kBlocks][4], low[kParts][S::kBlocks][4];
#pragma unroll
  for (int k = 0; k < kParts; ++k) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const float* pair = &s[i][2 * k + half / 2][half % 2 * 2];
        SplitFp16(pair[0], pair[1], kLowScale, &high[k][i][half], &low[k][i][half]);
      }
    }
  }
  const float low_factor = factor * kLowInverse;
  const uint32_t value = SharedAddress(values) + 2 * SwizzledOffset<kHead>(lane_ % 16, lane_ / 16);
#pragma unroll
  for (int j = 0; j < kOutputs; j += 2) {
    float large[S::kBlocks][2][4], small[S::kBlocks][2][4];
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
      uint32_t top[4];
      const uint32_t at = ChunkAddress<kHead>(value, j) + 2 * 16 * k * kHead;
      LoadMatrix4Transposed(top, at);
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        if constexpr (kPlanes == 2) {
          MmaOrSet(small[i][0], low[k][i], top[0], top[1], k == 0);
          MmaOrSet(small[i][1], low[k][i], top[2], top[3], k == 0);
        }
        MmaOrSet(large[i][0], high[k][i], top[0], top[1], k == 0);
        MmaOrSet(large[i][1], high[k][i], top[2], top[3], k == 0);
      }
      if constexpr (kPlanes == 2) {
        uint32_t rest[4];
        LoadMatrix4Transposed(rest, at + 2 * S::kPlane);
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i) {
          MmaOrSet(small[i][0], high[k][i], rest[0], rest[1], false);
          MmaOrSet(small[i][1], high[k][i], rest[2], rest[3], false);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        float& o = o_[i][j + e / 4][e % 4];
        o = fmaf(large[i][e / 4][e % 4], factor, o);
        if constexpr (kPlanes == 2) o = fmaf(small[i][e / 4][e % 4], low_factor, o);
      }
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_STEP_CUH_
