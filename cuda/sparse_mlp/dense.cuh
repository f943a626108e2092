// SPDX-License-Identifier: Apache-2.0
// Kernels around the GEMMs of many tokens: they dequantize weights, transpose tokens, and set hidden values of neurons
// that are not active to zero.
#ifndef STOF_CUDA_SPARSE_MLP_DENSE_CUH_
#define STOF_CUDA_SPARSE_MLP_DENSE_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/common/round.cuh"
#include "cuda/sparse_mlp/down.cuh"

namespace stof {
namespace cuda {
namespace mlp {

constexpr int kDenseTile = 32;  // neurons and tokens, or values and tokens, of a CTA
constexpr int kDenseTileRows = kMlpThreads / kDenseTile;

// to[k, t] = input[t, k]; zeros from T on.
template <typename T>
__global__ void __launch_bounds__(kMlpThreads) TransposeKernel(const __grid_constant__ MlpDenseParams p) {
  __shared__ T tile[kDenseTile][kDenseTile + 2];
  WaitForPrevious();
  LetNextStart();
  const int x = static_cast<int>(threadIdx.x) % kDenseTile, y = static_cast<int>(threadIdx.x) / kDenseTile;
  const int64_t across = (p.tokens_stride + kDenseTile - 1) / kDenseTile;
  const int64_t k0 = blockIdx.x / across * kDenseTile, t0 = blockIdx.x % across * kDenseTile;
#pragma unroll
  for (int i = y; i < kDenseTile; i += kDenseTileRows) {
    const bool is_inside = t0 + i < p.T && k0 + x < p.K;
    tile[i][x] = is_inside ? static_cast<const T*>(p.input)[(t0 + i) * p.K + k0 + x] : Round<T>(0.0f);
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kDenseTile; i += kDenseTileRows) {
    if (k0 + i < p.K && t0 + x < p.tokens_stride) {
      static_cast<T*>(p.transposed_input)[(k0 + i) * p.tokens_stride + t0 + x] = tile[x][i];
    }
  }
}

// dequantized_weight[F, size] = the rows of a quantized weight, rounded to T.
template <typename T, int kBits, bool kVectors, bool kIsDown>
__global__ void __launch_bounds__(kMlpThreads) DequantizeKernel(const __grid_constant__ MlpDenseParams p) {
  WaitForPrevious();
  LetNextStart();
  const MlpRows& rows = p.quantized_rows;
  const int64_t chunks = (rows.size + kMlpChunk - 1) / kMlpChunk, all = p.F * chunks;
  for (int64_t at = blockIdx.x * int64_t{kMlpThreads} + threadIdx.x; at < all; at += int64_t{gridDim.x} * kMlpThreads) {
    const int64_t row = at / chunks, chunk = at % chunks, count = rows.size - chunk * kMlpChunk;
    float values[kMlpChunk];
    if constexpr (!kIsDown) {
      Chunk<T, kBits> loaded;
      loaded.template Load<kVectors>(rows, row, chunk);
      loaded.Unscaled(values);
#pragma unroll
      for (int i = 0; i < kMlpChunk; ++i) values[i] *= loaded.scale;
    } else if constexpr (kVectors) {
      DownChunk<T, kBits> loaded;
      loaded.Load(rows, row, chunk * kMlpChunk);
      loaded.ToValues(values);
    } else {
      LoadColumns<T, kBits>(rows, row, chunk * kMlpChunk, count, values);
    }
    T* const to = static_cast<T*>(p.dequantized_weight) + row * rows.size + chunk * kMlpChunk;
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
}

// hidden[t, j] = activation(gate) * up where neuron j is active for token t, else 0.
template <typename T>
__global__ void __launch_bounds__(kMlpThreads) MaskedHiddenKernel(const __grid_constant__ MlpDenseParams p) {
  __shared__ float gates[kDenseTile][kDenseTile + 1], ups[kDenseTile][kDenseTile + 1];
  WaitForPrevious();
  LetNextStart();
  const int x = static_cast<int>(threadIdx.x) % kDenseTile, y = static_cast<int>(threadIdx.x) / kDenseTile;
  const int64_t across = (p.F + kDenseTile - 1) / kDenseTile;
  const int64_t j0 = blockIdx.x % across * kDenseTile, t0 = blockIdx.x / across * kDenseTile;
#pragma unroll
  for (int i = y; i < kDenseTile; i += kDenseTileRows) {
    if (j0 + i >= p.F || t0 + x >= p.T) continue;
    const int64_t at = (j0 + i) * p.tokens_stride + t0 + x;
    if (p.gate_matmul != nullptr) gates[i][x] = ToFloat(static_cast<const T*>(p.gate_matmul)[at]);
    if (p.up_matmul != nullptr) ups[i][x] = ToFloat(static_cast<const T*>(p.up_matmul)[at]);
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kDenseTile; i += kDenseTileRows) {
    const int64_t j = j0 + x, t = t0 + i;
    if (j >= p.F || t >= p.T) continue;
    float gate = 0.0f, h = 0.0f;
    bool is_active = false;
    if (p.gate_matmul != nullptr) {
      gate = gates[x][i];
      if (p.gate_bias != nullptr) gate += ToFloat(static_cast<const T*>(p.gate_bias)[j]);
      is_active = (p.masks[t / kMlpTokens * p.F + j] >> t % kMlpTokens & 1) != 0;
    } else {
      gate = ToFloat(static_cast<const T*>(p.gate)[t * p.F + j]);
    }
    const float a = Activated(p.activation, gate);
    if (p.gate_matmul == nullptr) is_active = IsActive(p, a, j);
    if (is_active) {
      h = a;
      if (p.up_matmul != nullptr) {
        float up = ups[x][i];
        if (p.up_bias != nullptr) up += ToFloat(static_cast<const T*>(p.up_bias)[j]);
        h *= up;
      }
    }
    static_cast<T*>(p.hidden)[t * p.F + j] = Round<T>(h);
  }
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_DENSE_CUH_
