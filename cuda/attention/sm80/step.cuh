// SPDX-License-Identifier: Apache-2.0
// One KV tile of the sm_80 kernel: scores, biases and mask, online softmax, P V. Member functions of Attention, whose
// registers they use; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM80_STEP_CUH_
#define STOF_CUDA_ATTENTION_SM80_STEP_CUH_

#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::Scores(
    int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = kInt8 ? kInt8ZeroFloat : 0.0f;
    }
  }
  if constexpr (kRelative) {
    if (AddRelativeTerms(tile, keys, s)) return;
  }
  const uint32_t first = keys + 2 * SwizzledOffset<kWords>(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
  constexpr int kAtOnce = S::kLargeHead ? (S::kM < kTileRows ? 8 : 4) : kSteps;  // more would need more registers
#pragma unroll kAtOnce
  for (int k = 0; k < kSteps; ++k) {
    if constexpr (!S::kQueriesInRegisters) ReadQueries(k, q_[0]);
    const uint32_t (&q)[S::kBlocks][4] = q_[S::kQueriesInRegisters ? k : 0];
#pragma unroll
    for (int j = 0; j < kColumns; j += 2) {
      uint32_t b[4];
      LoadMatrix4(b, ChunkAddress<kWords>(first, 2 * k) + 2 * 8 * j * kWords);
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        if constexpr (kInt8) {
          MmaInt8(s[i][j], q[i], b[0], b[1]);
          MmaInt8(s[i][j + 1], q[i], b[2], b[3]);
        } else {
          Mma<T>(s[i][j], q[i], b[0], b[1]);
          Mma<T>(s[i][j + 1], q[i], b[2], b[3]);
        }
      }
    }
  }
  if constexpr (kInt8) Dequantize(tile, keys, s);
}

template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::ApplyMaskAndBias(
    const KvTile& entry, Bits* bits, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
  if constexpr (kScoreMod && kRelative) {
    ScoreBiases<T, S::kBlocks, kColumns, true>(p_, b_, h_, row0_, entry.tile * S::kN, Row(0, 0), lane_ % 4 * 2,
                                               &this->relative.factor)
        .Add(p_.scale, s);
  } else if constexpr (kScoreMod) {
    ScoreBiases<T, S::kBlocks, kColumns>(p_, b_, h_, row0_, entry.tile * S::kN, Row(0, 0), lane_ % 4 * 2)
        .Add(p_.scale, s);
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
  if constexpr (!S::kEarlyMask) FetchBits(entry, bits);
  bits->Forbid(entry.bits, entry.pad, lane_, s);
}

// Raises the row max where a score exceeds it by kSlack, and rescales outputs and sums. Gives, uniformly in the warp,
// whether scores were replaced by the logarithms of weights: where some row max is so far from zero that its rounding
// would show in the weights.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ bool Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::RaiseMax(
    float (&s)[S::kBlocks][kColumns][4]) {
  float factor[S::kBlocks][2];
  bool any = false, far = false;
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high = -INFINITY;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) high = fmaxf(high, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = __fmul_rn(fmaxf(high, __shfl_xor_sync(~0u, high, 2)), scale_);
      const float old = max_[i][r];
      const bool raised = high - old > kSlack;  // not in a sum, which far from zero would be rounded
      max_[i][r] = raised ? high : old;
      factor[i][r] = raised ? Exp2(old - high) : 1.0f;  // 0 from -inf
      any |= raised;
      far |= fabsf(max_[i][r]) > kFar && max_[i][r] != -INFINITY;
    }
  }
  if (__any_sync(~0u, any)) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum_[i][r] *= factor[i][r];
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) o_[i][j][2 * r] *= factor[i][r], o_[i][j][2 * r + 1] *= factor[i][r];
      }
    }
  }
  const bool subtracted = __any_sync(~0u, far) != 0;
  if (__builtin_expect(subtracted, 0)) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float base = max_[i][e / 2] == -INFINITY ? 0.0f : max_[i][e / 2];
          s[i][j][e] = ScoreDifference(__fmul_rn(s[i][j][e], scale_), base);
        }
      }
    }
  }
  return subtracted;
}

// The weights of 16 keys, as an operand of P V.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::ComputeWeights(
    int k, bool subtracted, const float (&s)[S::kBlocks][kColumns][4], uint32_t (&a)[S::kBlocks][4]) {
  const float scale = subtracted ? 1.0f : scale_;
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = subtracted || max_[i][r] == -INFINITY ? 0.0f : max_[i][r];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float* const pair = s[i][2 * k + c] + 2 * r;
        const float x = Exp2(pair[0] * scale - base), y = Exp2(pair[1] * scale - base);
        sum_[i][r] += x;
        sum_[i][r] += y;
        a[i][2 * c + r] = Pack<T>(x, y);
      }
    }
  }
}

// 16 keys at a time, so that the special function unit overlaps the tensor cores.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::AddValues(
    uint32_t values, bool subtracted, const float (&s)[S::kBlocks][kColumns][4]) {
  const uint32_t first = values + 2 * SwizzledOffset<kHead>(lane_ % 16, lane_ / 16);
#pragma unroll
  for (int k = 0; k < S::kN / 16; ++k) {
    uint32_t a[S::kBlocks][4];
    ComputeWeights(k, subtracted, s, a);
#pragma unroll
    for (int j = 0; j < kOutputs; j += 2) {
      uint32_t b[4];
      LoadMatrix4Transposed(b, ChunkAddress<kHead>(first, j) + 2 * 16 * k * kHead);
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        Mma<T>(o_[i][j], a[i], b[0], b[1]);
        Mma<T>(o_[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_STEP_CUH_
