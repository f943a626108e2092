// SPDX-License-Identifier: Apache-2.0
// The kernel that runs before the fp32 attention kernel and splits keys and values into fp16 values.
#ifndef STOF_CUDA_ATTENTION_FP32_SPLIT_OPERANDS_CUH_
#define STOF_CUDA_ATTENTION_FP32_SPLIT_OPERANDS_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/fp32/shape.cuh"

namespace stof {
namespace cuda {

// A CTA splits one tile of keys or of values.
template <int kHead, int kPlanes>
class Splitter {
  using S = Fp32Shape<kHead, kPlanes>;
  static constexpr int kThreads = 256;
  static constexpr int kRows = kThreads / S::kLanes;  // at a time
  static constexpr int kSteps = kTileKeys / kRows;

 public:
  static __device__ void Run(const Fp32Params& params) {
    const AttentionParams& p = params.attention;
    const int tiles = (p.T + kTileKeys - 1) / kTileKeys;
    const int64_t item = blockIdx.x / 2;
    const bool values = blockIdx.x % 2 != 0;
    const int tile = static_cast<int>(item % tiles);
    const int64_t bg = item / tiles;
    const int b = static_cast<int>(bg / p.G), g = static_cast<int>(bg % p.G);
    const Strides& stride = values ? p.value_stride : p.key_stride;
    const void* base = values ? p.value : p.key;
    const int size = values ? p.Dv : p.D;
    const bool aligned = AreRowsAligned(base, stride, size);
    const float* from = static_cast<const float*>(base) + b * stride.b + g * stride.h;
    __half* high = static_cast<__half*>(const_cast<void*>(values ? params.value_tiles : params.key_tiles)) +
                   item * kPlanes * S::kPlane;
    const int first = threadIdx.x / S::kLanes, lane = threadIdx.x % S::kLanes;
    // Values of padded keys are multiplied by zero: they may be any finite number, and do not count for the scale.
    const auto policy = static_cast<EmptyRows>(p.empty_rows);
    const bool drop = values && p.pad_bits != nullptr && policy != EmptyRows::kMean && policy != EmptyRows::kAll;
    float4 x[kSteps][S::kQuads];
    uint32_t largest[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first + i * kRows;
      const int64_t key = int64_t{tile} * kTileKeys + row;
      bool valid = key < p.T;
      if (drop) {
        const uint32_t word = p.pad_bits[(int64_t{b} * tiles + tile) * 2 + row / 32];
        valid = valid && (word >> (row % 32) & 1u) != 0;
      }
      largest[i] = 0;
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        x[i][j] = LoadQuad(from + key * stride.s, lane + j * S::kLanes, size, valid, aligned);
        largest[i] = max(largest[i], LargestOf(x[i][j]));
      }
    }
    if (values) {
      __shared__ uint32_t found;
      if (threadIdx.x == 0) found = 0;
      __syncthreads();
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) most = max(most, largest[i]);
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0) atomicMax(&found, most);
      __syncthreads();
      const int exponent = ExponentOf(found, -100) - kTopExponent;
      if (threadIdx.x == 0) const_cast<float*>(params.value_factors)[item] = PowerOfTwo(exponent);
      Store(x, high, first, lane, [exponent](int) { return PowerOfTwo(-exponent); }, kLowScale);
      return;
    }
    int exponents[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int step = S::kLanes / 2; step > 0; step /= 2) {
        largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], step));
      }
      exponents[i] = ExponentOf(largest[i], -100) - kTopExponent;
      if (lane == 0) {
        const_cast<float*>(params.key_factors)[item * kTileKeys + first + i * kRows] = PowerOfTwo(exponents[i]);
      }
    }
    Store(x, high, first, lane, [&exponents](int i) { return PowerOfTwo(-exponents[i]); }, 1.0f);
  }

 private:
  template <typename Factor>
  static __device__ __forceinline__ void Store(const float4 (&x)[kSteps][S::kQuads], __half* high, int first, int lane,
                                               Factor factor, float scale) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        const int quad = lane + j * S::kLanes;
        if (4 * quad < kHead) {
          StoreQuad<kHead, kPlanes>(x[i][j], factor(i), scale, first + i * kRows, quad, high, S::kPlane);
        }
      }
    }
  }
};

template <int kHead, int kPlanes>
__global__ void __launch_bounds__(256) SplitKernel(const __grid_constant__ Fp32Params params) {
  Splitter<kHead, kPlanes>::Run(params);
}

template <int kHead, int kPlanes>
int SplitFp32(const Fp32Params& params, void* stream) {
  const AttentionParams& p = params.attention;
  const int64_t items = int64_t{2} * p.B * p.G * ((p.T + kTileKeys - 1) / kTileKeys);
  if (items == 0) return 0;
  Fp32Params copy = params;
  void* arguments[] = {&copy};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(SplitKernel<kHead, kPlanes>),
                                           dim3(static_cast<unsigned>(items)), dim3(256), arguments, 0,
                                           static_cast<cudaStream_t>(stream)));
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_SPLIT_OPERANDS_CUH_
