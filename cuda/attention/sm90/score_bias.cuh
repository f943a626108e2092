// SPDX-License-Identifier: Apache-2.0
// Scale, softcap, full and relative bias of the sm_90a kernels: their loads by the producer and their use by consumers.
// Member functions of Attention, which own the stages; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_SCORE_BIAS_CUH_
#define STOF_CUDA_ATTENTION_SM90_SCORE_BIAS_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Loads the biases of a tile into its stage; they complete on the barrier of the keys. Gives the bytes that TMA still
// has to copy, and adds flags.
template <typename S, typename T>
__device__ __forceinline__ int Sm90Attention<S, T>::LoadBiases(int tile, const Cursor& cursor, int* flags) {
  const AttentionParams& p = p_.attention;
  const int at = cursor.stage.at;
  int bytes = 0;
  if (S::kFullBias && p.bias != nullptr) {
    const int columns = p.bias_is_float != 0 ? 32 : 64;  // 128 bytes
    const int rows = p_.bias_one_row != 0 ? 1 : S::kM;
    bytes = S::kN / columns * rows * 128;
    for (int c = 0; lane_ == 0 && c < S::kN / columns; ++c) {
      CopyTensor(base_ + S::kFullBiases + at * S::kBiasBytes + c * S::kM * 128, &p_.bias, Barrier(kKeyFull, at),
                 tile * S::kN + c * columns, p_.bias_one_row != 0 ? 0 : cursor.row0, p_.bias_step_h * cursor.h,
                 p_.bias_step_b * cursor.b);
    }
  }
  if (p.relative_bias != nullptr) {
    // From the distance between the first key and the last query row of the tile on.
    const int radius = static_cast<int>(p.relative_bias_size / 2);
    const float* const middle = p.relative_bias + cursor.h * p.relative_bias_stride_h + radius;
    const int first = tile * S::kN - (p.query_position + cursor.row0) - (S::kM - 1);
    float* const to = reinterpret_cast<float*>(shared_ + S::kRelativeBiases) + at * S::kRelativeSize;
    float least = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kRelativeSize; i += 32) {
      const float bias = middle[max(-radius, min(radius, first + i + lane_))];
      least = fminf(least, bias);
      to[i + lane_] = bias == -INFINITY ? bias : MaxOrNan(bias, kLowestBias);
    }
    if (__any_sync(~0u, least == -INFINITY) != 0) *flags |= kHasInfBias;
  }
  __syncwarp();  // all lanes have written before lane 0 arrives
  return bytes;
}

// Applies scale, softcap and biases. A bias of -inf forbids, whatever the score; the lowest finite bias must not become
// -inf in units of log2.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::ApplyScoreMod(int stage, int flags, float (&s)[kScores]) {
  const AttentionParams& p = p_.attention;
  float factor = p.scale;
  if (p.softcap > 0.0f) {
    // softcap * tanh(x / softcap), with an absolute error of a few last bits of softcap.
    const float in = p.scale * (2.0f * kLog2E) / p.softcap, most = p.softcap;
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = most - 2.0f * most * Reciprocal(1.0f + Exp2(s[i] * in));
    factor = 1.0f;
  }
  if (S::kFullBias && p.bias != nullptr) {
    if (p.bias_is_float != 0) {
      AddFullBias<float>(stage, factor, s);
    } else {
      AddFullBias<T>(stage, factor, s);
    }
    factor = 1.0f;
  }
  if (p.relative_bias != nullptr) {
    // Eight rows below have the distances of eight keys before.
    const uint32_t own =
        base_ + S::kRelativeBiases + 4 * (stage * S::kRelativeSize + (S::kM - 1) - row_ + lane_ % 4 * 2);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float before = LoadSharedFloat(own + 4 * (e - 8));
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j) {
        const float here = LoadSharedFloat(own + 4 * (8 * j + e));
        s[4 * j + e] = s[4 * j + e] * factor + here;
        s[4 * j + 2 + e] = s[4 * j + 2 + e] * factor + before;
        before = here;
      }
    }
    if ((flags & kHasInfBias) != 0) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if (LoadSharedFloat(own + 4 * (i / 4 * 8 + i % 2 - i / 2 % 2 * 8)) == -INFINITY) s[i] = -INFINITY;
      }
    }
    factor = 1.0f;
  }
  if (factor != 1.0f) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] *= factor;
  }
}

// The shared address of this thread's biases in a stage, of type B; *next: the offset of its second row. Chunk c of 16
// bytes of row r (128 bytes) is at c ^ (r % 8).
template <typename S, typename T>
template <typename B>
__device__ __forceinline__ uint32_t Sm90Attention<S, T>::BiasAddress(int stage, uint32_t* next) const {
  const bool one_row = p_.bias_one_row != 0;
  const auto lane = static_cast<uint32_t>(lane_);
  const uint32_t row = one_row ? 0 : static_cast<uint32_t>(row_) * 128 + (lane / 4 << 4);
  *next = one_row ? 0 : 8 * 128;
  const uint32_t at = base_ + S::kFullBiases + stage * S::kBiasBytes + row;
  return sizeof(B) == 4 ? (at ^ (lane % 4 / 2 << 4)) + lane % 2 * 8 : at + lane % 4 * 4;
}

// The biases of elements 4 j + 2 r and 4 j + 2 r + 1.
template <typename S, typename T>
template <typename B>
__device__ __forceinline__ float2 Sm90Attention<S, T>::ReadBias(uint32_t own, int j, uint32_t row) {
  if constexpr (sizeof(B) == 4) {
    return LoadSharedFloats((own ^ static_cast<uint32_t>(j % 4 << 5)) + j / 4 * S::kM * 128 + row);
  } else {
    return Unpack<B>(LoadSharedWord((own ^ static_cast<uint32_t>(j % 8 << 4)) + j / 8 * S::kM * 128 + row));
  }
}

template <typename S, typename T>
template <typename B>
__device__ __forceinline__ void Sm90Attention<S, T>::AddFullBias(int stage, float factor, float (&s)[kScores]) const {
  uint32_t next;
  const uint32_t own = BiasAddress<B>(stage, &next);
  float least[kChains] = {};
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const float2 bias = ReadBias<B>(own, i / 4, i / 2 % 2 * next);
    s[i] = s[i] * factor + bias.x;
    s[i + 1] = s[i + 1] * factor + bias.y;
    least[i / 2 % kChains] = fminf(least[i / 2 % kChains], fminf(bias.x, bias.y));
  }
#pragma unroll
  for (int c = 1; c < kChains; ++c) least[0] = fminf(least[0], least[c]);
  // Rare: some biases are -inf, or would become it in units of log2.
  if (__any_sync(~0u, least[0] < kLowestBias) == 0) return;
#pragma unroll
  for (int i = 0; i < kScores; i += 2) {
    const float2 bias = ReadBias<B>(own, i / 4, i / 2 % 2 * next);
    if (bias.x < kLowestBias) s[i] = bias.x == -INFINITY ? -INFINITY : MaxOrNan(s[i], kLowestBias);
    if (bias.y < kLowestBias) s[i + 1] = bias.y == -INFINITY ? -INFINITY : MaxOrNan(s[i + 1], kLowestBias);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_SCORE_BIAS_CUH_
