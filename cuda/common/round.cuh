// SPDX-License-Identifier: Apache-2.0
// fp32 to the types that tensors and caches have, rounded to nearest even.
#ifndef STOF_CUDA_COMMON_ROUND_CUH_
#define STOF_CUDA_COMMON_ROUND_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "plugins/core/base/float8.h"

namespace stof {
namespace cuda {

template <typename T>
__device__ __forceinline__ T Round(float x);
template <>
__device__ __forceinline__ float Round<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half Round<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 Round<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
// Quantized types saturate. NaN becomes 127 in int8 and stays NaN in fp8.
template <>
__device__ __forceinline__ int8_t Round<int8_t>(float x) {
  return static_cast<int8_t>(__float2int_rn(fmaxf(fminf(x, 127.0f), -128.0f)));
}
template <>
__device__ __forceinline__ Float8 Round<Float8>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_ROUND_CUH_
