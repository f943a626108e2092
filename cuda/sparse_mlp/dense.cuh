// SPDX-License-Identifier: Apache-2.0
// Kernels around the GEMMs of many tokens: they dequantize weights, and set hidden values of neurons that are not
// active to zero.
#ifndef STOF_CUDA_SPARSE_MLP_DENSE_CUH_
#define STOF_CUDA_SPARSE_MLP_DENSE_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/common/round.cuh"
#include "cuda/sparse_mlp/down.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// The first `count` of eight values, rounded to T; with kVectors all.
template <typename T, bool kVectors>
__device__ __forceinline__ void StoreChunk(const float (&values)[kMlpChunk], int64_t count, T* to) {
  if constexpr (kVectors) {
    *reinterpret_cast<uint4*>(to) = make_uint4(Pack<T>(values[0], values[1]), Pack<T>(values[2], values[3]),
                                               Pack<T>(values[4], values[5]), Pack<T>(values[6], values[7]));
  } else {
#pragma unroll
    for (int i = 0; i < kMlpChunk; ++i) {
      if (i < count) to[i] = Round<T>(values[i]);
    }
  }
}

// weight[count, size] = the rows of a quantized weight, rounded to T.
template <typename T, int kBits, bool kVectors, bool kIsDown>
__global__ void __launch_bounds__(kMlpThreads) DequantizeKernel(const __grid_constant__ MlpDequantizeParams p) {
  WaitForPrevious();
  LetNextStart();
  const NeuronRows& rows = p.rows;
  const int64_t chunks = (rows.size + kMlpChunk - 1) / kMlpChunk, all = p.count * chunks;
  for (int64_t at = blockIdx.x * int64_t{kMlpThreads} + threadIdx.x; at < all; at += int64_t{gridDim.x} * kMlpThreads) {
    const int64_t row = at / chunks, chunk = at % chunks, count = rows.size - chunk * kMlpChunk;
    float values[kMlpChunk];
    if constexpr (!kIsDown) {
      Chunk<T, kBits> loaded;
      loaded.template Load<kVectors>(rows, row, chunk);
      loaded.Unscaled(values);
      const float scale = p.applies_scales ? loaded.scale : 1.0f;
#pragma unroll
      for (int i = 0; i < kMlpChunk; ++i) values[i] *= scale;
    } else if constexpr (kVectors) {
      DownChunk<T, kBits> loaded;
      loaded.Load(rows, row, chunk * kMlpChunk);
      loaded.ToValues(values);
    } else {
      LoadColumns<T, kBits>(rows, row, chunk * kMlpChunk, count, values);
    }
    StoreChunk<T, kVectors>(values, count, static_cast<T*>(p.weight) + row * rows.size + chunk * kMlpChunk);
  }
}

template <typename T, bool kVectors>
__device__ __forceinline__ void AddBias(const void* bias, int64_t chunk, int64_t size, float (&values)[kMlpChunk]) {
  if (bias == nullptr) return;
  float x[kMlpChunk];
  LoadToken<T, kVectors>(static_cast<const T*>(bias), chunk, size, x);
#pragma unroll
  for (int i = 0; i < kMlpChunk; ++i) values[i] += x[i];
}

// hidden[t, j] = activation(gate) * up where neuron j is active for token t, else 0. A thread has a chunk of a token.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kMlpThreads) MaskedHiddenKernel(const __grid_constant__ MlpMaskedHiddenParams p) {
  WaitForPrevious();
  LetNextStart();
  const int64_t chunks = (p.F + kMlpChunk - 1) / kMlpChunk;
  const auto ctas_of_token = static_cast<uint32_t>((chunks + kMlpThreads - 1) / kMlpThreads);
  const int64_t t = blockIdx.x / ctas_of_token;
  const int64_t chunk = int64_t{blockIdx.x % ctas_of_token} * kMlpThreads + threadIdx.x;
  if (chunk >= chunks) return;
  const int64_t j = chunk * kMlpChunk, at = t * p.F;
  float gates[kMlpChunk], ups[kMlpChunk], hidden[kMlpChunk];
  LoadToken<T, kVectors>(static_cast<const T*>(p.gate) + at, chunk, p.F, gates);
  if (p.up_matmul != nullptr) LoadToken<T, kVectors>(static_cast<const T*>(p.up_matmul) + at, chunk, p.F, ups);
  AddBias<T, kVectors>(p.gate_bias, chunk, p.F, gates);
  AddBias<T, kVectors>(p.up_bias, chunk, p.F, ups);
  const uint32_t mask = p.masks == nullptr ? 0u : p.masks[t * p.mask_words + j / 32] >> j % 32;
#pragma unroll
  for (int i = 0; i < kMlpChunk; ++i) {
    const float activated = Activate(p.activation, gates[i]);
    const bool is_active = p.masks != nullptr ? (mask >> i & 1) != 0 : j + i < p.F && IsActive(p, activated, j + i);
    hidden[i] = !is_active ? 0.0f : p.up_matmul == nullptr ? activated : activated * ups[i];
  }
  StoreChunk<T, kVectors>(hidden, p.F - j, static_cast<T*>(p.hidden) + at + j);
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_DENSE_CUH_
