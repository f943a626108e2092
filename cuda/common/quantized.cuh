// SPDX-License-Identifier: Apache-2.0
// int8 and fp8 (e4m3fn) to other types, four values at a time. All of them hold every value exactly.
#ifndef STOF_CUDA_COMMON_QUANTIZED_CUH_
#define STOF_CUDA_COMMON_QUANTIZED_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "plugins/core/base/float8.h"

namespace stof {
namespace cuda {

template <typename Pair>
__device__ __forceinline__ uint32_t BitsOf(const Pair& pair) {
  static_assert(sizeof(Pair) == 4, "two 16-bit values");
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <typename Pair>
__device__ __forceinline__ Pair PairOf(uint32_t bits) {
  return *reinterpret_cast<const Pair*>(&bits);
}

// Converts the four values of a word, in the order of memory.
template <typename T, typename Stored>
struct Unpack;

template <>
struct Unpack<__half, int8_t> {
  static __device__ __forceinline__ void Run(uint32_t word, uint32_t (&out)[2]) {
    // 0x64 in front of x + 128 is the fp16 value 1024 + x + 128.
    const uint32_t shifted = word ^ 0x80808080u;
    const __half2 base = PairOf<__half2>(0x64806480u);
    out[0] = BitsOf(__hsub2(PairOf<__half2>(__byte_perm(shifted, 0x64646464u, 0x4140)), base));
    out[1] = BitsOf(__hsub2(PairOf<__half2>(__byte_perm(shifted, 0x64646464u, 0x4342)), base));
  }
};

template <>
struct Unpack<__nv_bfloat16, int8_t> {
  static __device__ __forceinline__ uint32_t Convert(uint32_t bits) {
    // 0x43 in front of the low 7 bits is 128 + these; in front of the sign bit alone it is 128, or 256 where it is set.
    return BitsOf(__hsub2(PairOf<__nv_bfloat162>(bits & 0xff7fff7fu), PairOf<__nv_bfloat162>(bits & 0xff80ff80u)));
  }
  static __device__ __forceinline__ void Run(uint32_t word, uint32_t (&out)[2]) {
    out[0] = Convert(__byte_perm(word, 0x43434343u, 0x4140));
    out[1] = Convert(__byte_perm(word, 0x43434343u, 0x4342));
  }
};

__device__ __forceinline__ __half2 Float8ToHalf(uint32_t two) {
  return __half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3));
}

template <>
struct Unpack<__half, Float8> {
  static __device__ __forceinline__ void Run(uint32_t word, uint32_t (&out)[2]) {
    out[0] = BitsOf(Float8ToHalf(word & 0xffffu));
    out[1] = BitsOf(Float8ToHalf(word >> 16));
  }
};

template <>
struct Unpack<__nv_bfloat16, Float8> {
  static __device__ __forceinline__ uint32_t Convert(uint32_t two) {
    const float2 x = __half22float2(Float8ToHalf(two));
    return BitsOf(__floats2bfloat162_rn(x.x, x.y));
  }
  static __device__ __forceinline__ void Run(uint32_t word, uint32_t (&out)[2]) {
    out[0] = Convert(word & 0xffffu);
    out[1] = Convert(word >> 16);
  }
};

// Four values as fp32.
__device__ __forceinline__ void UnpackFloats(uint32_t word, float (&out)[4], int8_t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = static_cast<float>(static_cast<int8_t>(word >> 8 * i & 0xffu));
}
__device__ __forceinline__ void UnpackFloats(uint32_t word, float (&out)[4], Float8) {
  const float2 low = __half22float2(Float8ToHalf(word & 0xffffu)), high = __half22float2(Float8ToHalf(word >> 16));
  out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_QUANTIZED_CUH_
