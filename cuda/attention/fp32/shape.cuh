// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the fp32 kernels, and the split of an fp32 number into two fp16 values.
#ifndef STOF_CUDA_ATTENTION_FP32_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_FP32_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/fp32/api.h"
#include "cuda/attention/sm80/shape.cuh"

namespace stof {
namespace cuda {

// Scaled numbers are below 2^15. Low parts of values and weights are multiplied by 2^11, so that they are not
// subnormal.
constexpr int kTopExponent = 14;
constexpr float kLowScale = 2048.0f, kLowInverse = 1.0f / 2048.0f;

// kPlanes: 2: high and low parts; 1: high parts alone. kRows: query rows of a CTA.
template <int kHead, int kPlanes, int kRows = 64>
struct Fp32Shape {
  static constexpr int kM = kRows, kN = kTileKeys;
  static constexpr int kBlocks = kRows == 128 ? 2 : 1;                                // blocks of 16 rows of a warp
  static constexpr int kCtas = kHead > 128 ? 1 : kHead > 64 || kRows == 128 ? 2 : 4;  // an SM
  static constexpr int kWarps = kM / 16 / kBlocks;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kCtasPerTile = kTileRows / kM;  // CTAs for a tile of the block mask
  static constexpr int kPlane = kN * kHead;            // elements
  static constexpr int kValueBytes = 2 * kPlanes * kPlane;
  static constexpr int kKeyBytes = kValueBytes + 4 * kN;  // the planes and the factors
  static constexpr int kQueryElements = kPlanes * kM * kHead;
  static constexpr int kQueryBytes = 2 * kQueryElements + 4 * kM;
  // Lanes that load a row, 4 elements each, and loads of a lane.
  static constexpr int kLanes = kHead > 64 ? 32 : kHead / 4;
  static constexpr int kQuads = (kHead + 4 * kLanes - 1) / (4 * kLanes);
  // stages: buffers for keys and for values; 0: they share one.
  static constexpr int SharedBytes(int stages) {
    return kQueryBytes + (stages == 0 ? kKeyBytes : stages * (kKeyBytes + kValueBytes));
  }
};

// 2^exponent, for exponents in -126 ... 127.
__device__ __forceinline__ float PowerOfTwo(int exponent) { return __int_as_float((127 + exponent) << 23); }

// The exponent of a finite magnitude, given by its bits; at least `least`.
__device__ __forceinline__ int ExponentOf(uint32_t bits, int least) {
  return max(least, static_cast<int>(bits >> 23) - 127);
}

__device__ __forceinline__ uint32_t FiniteBits(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// Loads elements [4 quad, 4 quad + 4) of a row of `size` elements; zeros beyond.
__device__ __forceinline__ float4 LoadQuad(const float* row, int quad, int size, bool valid, bool aligned) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int first = 4 * quad;
  if (!valid || first >= size) return x;
  if (aligned) return *reinterpret_cast<const float4*>(row + first);
  x.x = row[first];
  if (first + 1 < size) x.y = row[first + 1];
  if (first + 2 < size) x.z = row[first + 2];
  if (first + 3 < size) x.w = row[first + 3];
  return x;
}

__device__ __forceinline__ uint32_t LargestOf(const float4& x) {
  return max(max(FiniteBits(x.x), FiniteBits(x.y)), max(FiniteBits(x.z), FiniteBits(x.w)));
}

// Splits two numbers; each word has the high or low parts of both. low is multiplied by `scale`.
__device__ __forceinline__ void SplitFp16(float x, float y, float scale, uint32_t* high, uint32_t* low) {
  const __half2 top = __floats2half2_rn(x, y);
  const float2 kept = __half22float2(top);
  const __half2 rest = __floats2half2_rn((x - kept.x) * scale, (y - kept.y) * scale);
  *high = *reinterpret_cast<const uint32_t*>(&top);
  *low = *reinterpret_cast<const uint32_t*>(&rest);
}

// Stores four split numbers; the low parts are `plane` elements behind the high ones.
template <int kHead, int kPlanes>
__device__ __forceinline__ void StoreQuad(const float4& x, float factor, float scale, int row, int quad, __half* high,
                                          int plane) {
  uint2 top, rest;
  SplitFp16(x.x * factor, x.y * factor, scale, &top.x, &rest.x);
  SplitFp16(x.z * factor, x.w * factor, scale, &top.y, &rest.y);
  const int at = SwizzledOffset<kHead>(row, quad / 2) + quad % 2 * 4;
  *reinterpret_cast<uint2*>(high + at) = top;
  if constexpr (kPlanes == 2) *reinterpret_cast<uint2*>(high + plane + at) = rest;
}

__device__ __forceinline__ bool AreRowsAligned(const void* base, const Strides& stride, int size) {
  return (reinterpret_cast<uintptr_t>(base) % 16 | ((stride.b | stride.h | stride.s | size) & 3)) == 0;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_SHAPE_CUH_
