// SPDX-License-Identifier: Apache-2.0
// Rows of weights and tokens in chunks of eight values, and their dot products in fp32.
#ifndef STOF_CUDA_SPARSE_MLP_ROWS_CUH_
#define STOF_CUDA_SPARSE_MLP_ROWS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/common/activation.cuh"
#include "cuda/common/mma_sm80.cuh"
#include "cuda/common/quantized.cuh"
#include "cuda/sparse_mlp/params.h"

namespace stof {
namespace cuda {
namespace mlp {

constexpr unsigned kAllLanes = 0xffffffffu;

// Weights stream past the L1 cache, which keeps the tokens. Volatile: a load stays behind the branch that guards it.
template <int kWords>
__device__ __forceinline__ void LoadStreamed(uint32_t (&r)[kWords], const void* from) {
  if constexpr (kWords % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3])
                   : "l"(static_cast<const uint32_t*>(from) + i));
    }
  } else if constexpr (kWords == 2) {
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "l"(from));
  } else {
    static_assert(kWords == 1, "1, 2 or a multiple of 4 words");
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r[0]) : "l"(from));
  }
}

// Four words of a token through the L1 cache: all warps of the SM read the same tokens. Volatile as above.
__device__ __forceinline__ void LoadCached(uint32_t* r, const void* from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(from));
}

__device__ __forceinline__ void PrefetchL2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// The words of eight values.
template <typename T, int kBits>
constexpr int kChunkWords = kBits == 0 ? kMlpChunk * static_cast<int>(sizeof(T)) / 4 : kBits * kMlpChunk / 32;

template <typename T>
__device__ __forceinline__ void ToFloats(const uint32_t (&words)[kChunkWords<T, 0>], float (&out)[kMlpChunk]) {
#pragma unroll
  for (int i = 0; i < kChunkWords<T, 0>; ++i) {
    if constexpr (sizeof(T) == 4) {
      out[i] = __uint_as_float(words[i]);
    } else if constexpr (std::is_same<T, __half>::value) {
      const float2 pair = __half22float2(PairOf<__half2>(words[i]));
      out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
    } else {
      out[2 * i] = __uint_as_float(words[i] << 16), out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
}

// out[i] = q[i] - zero. 0x64 in front of q is the fp16 value 1024 + q, so that all steps are exact.
template <int kBits>
__device__ __forceinline__ void QuantizedToFloats(const uint32_t (&words)[kBits / 4], float zero,
                                                  float (&out)[kMlpChunk]) {
  const __half2 base = __float2half2_rn(1024.0f + zero);
  if constexpr (kBits == 8) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = __byte_perm(words[i / 2], 0x64646464u, i % 2 == 0 ? 0x4140 : 0x4342);
      const float2 values = __half22float2(__hsub2(PairOf<__half2>(pair), base));
      out[2 * i] = values.x, out[2 * i + 1] = values.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // values i and i + 4
      const uint32_t pair = (words[0] >> 4 * i & 0x000f000fu) | 0x64006400u;
      const float2 values = __half22float2(__hsub2(PairOf<__half2>(pair), base));
      out[i] = values.x, out[i + 4] = values.y;
    }
  }
}

// Eight values of a gate, up or predictor row, as they lie in memory.
template <typename T, int kBits>
struct Chunk {
  static constexpr int kWords = kChunkWords<T, kBits>;
  uint32_t words[kWords] = {};
  float scale = 1.0f, zero = 0.0f;

  // Values [8 chunk, 8 chunk + 8) of a row; zeros beyond its size where rows are not vectorized and not quantized.
  template <bool kVectors>
  __device__ __forceinline__ void Load(const NeuronRows& rows, int64_t row, int64_t chunk) {
    const char* const from =
        static_cast<const char*>(rows.data) + row * rows.stride + chunk * (kBits == 0 ? 8 * sizeof(T) : kBits);
    if constexpr (kVectors) {
      LoadStreamed(words, from);
    } else if constexpr (kBits == 0) {
      LoadBounded(from, rows.size - chunk * kMlpChunk);
    } else {  // rows are padded to whole blocks
#pragma unroll
      for (int i = 0; i < kBits; ++i) {
        words[i / 4] |= static_cast<uint32_t>(static_cast<const uint8_t*>(static_cast<const void*>(from))[i])
                        << i % 4 * 8;
      }
    }
    if constexpr (kBits != 0) {
      const int64_t block = chunk * kMlpChunk >> rows.block_shift;
      scale = ToFloat(reinterpret_cast<const T*>(rows.scales)[row * rows.blocks + block]);
      zero = kBits == 4 ? 8.0f : 128.0f;
      if (rows.zero_points != nullptr) {
        const uint8_t* const zeros = rows.zero_points + row * rows.zero_bytes;
        zero = static_cast<float>(kBits == 8 ? zeros[block] : zeros[block / 2] >> block % 2 * 4 & 15);
      }
    }
  }
  __device__ __forceinline__ void LoadBounded(const void* from, int64_t count) {
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kMlpChunk; ++i) words[i] = i < count ? static_cast<const uint32_t*>(from)[i] : 0u;
    } else {
#pragma unroll
      for (int i = 0; i < kMlpChunk; ++i) {
        const uint32_t value = i < count ? static_cast<const uint16_t*>(from)[i] : 0u;
        words[i / 2] = i % 2 == 0 ? value : words[i / 2] | value << 16;
      }
    }
  }
  // Without the scale.
  __device__ __forceinline__ void Unscaled(float (&out)[kMlpChunk]) const {
    if constexpr (kBits == 0) {
      ToFloats<T>(words, out);
    } else {
      QuantizedToFloats<kBits>(words, zero, out);
    }
  }
  __device__ __forceinline__ float Dot(const float (&x)[kMlpChunk]) const {
    float w[kMlpChunk], sum = 0.0f;
    Unscaled(w);
#pragma unroll
    for (int i = 0; i < kMlpChunk; ++i) sum = fmaf(w[i], x[i], sum);
    return kBits == 0 ? sum : scale * sum;
  }
};

// Eight values of a token, zeros beyond its size.
template <typename X, bool kVectors>
__device__ __forceinline__ void LoadToken(const X* token, int64_t chunk, int64_t size, float (&out)[kMlpChunk]) {
  const X* const from = token + chunk * kMlpChunk;
  if constexpr (kVectors) {
    uint32_t words[kChunkWords<X, 0>];
#pragma unroll
    for (int i = 0; i < kChunkWords<X, 0>; i += 4) {
      LoadCached(words + i, reinterpret_cast<const uint32_t*>(from) + i);
    }
    ToFloats<X>(words, out);
  } else {
    const int64_t count = size - chunk * kMlpChunk;
#pragma unroll
    for (int i = 0; i < kMlpChunk; ++i) out[i] = i < count ? ToFloat(from[i]) : 0.0f;
  }
}

// sums[r][t] += row r · token t over chunks first, first + step, ...: the part of one lane.
// All weights have rows of one size. kVectors: rows and tokens are read in vectors.
template <typename T, int kBits, bool kVectors, typename X, int kRows, int kTokens, int kUnroll>
__device__ __forceinline__ void AddDots(const NeuronRows* const (&weights)[kRows], const int64_t (&row)[kRows],
                                        const X* const (&tokens)[kTokens], int64_t first, int64_t step,
                                        float (&sums)[kRows][kTokens]) {
  const int64_t size = weights[0]->size, chunks = (size + kMlpChunk - 1) / kMlpChunk;
  for (int64_t c = first; c < chunks; c += kUnroll * step) {
    Chunk<T, kBits> loaded[kUnroll][kRows];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (c + u * step < chunks) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) loaded[u][r].template Load<kVectors>(*weights[r], row[r], c + u * step);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (c + u * step >= chunks) continue;
      float w[kRows][kMlpChunk];
#pragma unroll
      for (int r = 0; r < kRows; ++r) loaded[u][r].Unscaled(w[r]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        float x[kMlpChunk];
        LoadToken<X, kVectors>(tokens[t], c + u * step, size, x);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float sum = kBits == 0 ? sums[r][t] : 0.0f;
#pragma unroll
          for (int i = 0; i < kMlpChunk; ++i) sum = fmaf(w[r][i], x[i], sum);
          sums[r][t] = kBits == 0 ? sum : fmaf(loaded[u][r].scale, sum, sums[r][t]);
        }
      }
    }
  }
}

// The largest value of the lanes of a warp, in all of them. NaN is left out.
__device__ __forceinline__ float MaxOverWarp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, offset));
  return x;
}

// The sum of a value over the lanes of a warp, in all of them.
__device__ __forceinline__ float SumOverWarp(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAllLanes, x, offset);
  return x;
}

__device__ __forceinline__ float Activate(Activation activation, float x) {
  return cuda::Activate<Fp32Activations>(activation, x);
}

// NaN is above: it makes a neuron active.
__device__ __forceinline__ bool IsAbove(float x, float threshold) { return !(x <= threshold); }

// Whether a neuron is active, by its activation or its score.
template <typename Params>
__device__ __forceinline__ bool IsActive(const Params& p, float x, int64_t neuron) {
  if (p.selection == SparseMlpSelection::kNonzero) return x != 0.0f;
  const float found = p.selection == SparseMlpSelection::kMagnitude && x < 0.0f ? -x : x;
  return IsAbove(found, p.threshold[neuron * p.threshold_stride]);
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_ROWS_CUH_
