// SPDX-License-Identifier: Apache-2.0
// Loads of the kernels that choose pages, and pairs of 16-bit values. The host's tests have functions of their own in
// place of these.
#ifndef STOF_CUDA_CHOOSE_PAGES_LOADS_CUH_
#define STOF_CUDA_CHOOSE_PAGES_LOADS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace stof {
namespace cuda {

// For data of the previous kernel: the compiler keeps it behind the wait.
__device__ __forceinline__ int32_t LoadFresh(const int32_t* from) {
  int32_t x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void LoadFresh(uint32_t (&x)[4], const void* from) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(from)
               : "memory");
}
// 16 bytes that are read once; zeros where not `valid`.
__device__ __forceinline__ void LoadBounds(uint32_t (&x)[4], const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(x[0]), "=&r"(x[1]), "=&r"(x[2]), "=&r"(x[3])
      : "l"(from), "r"(static_cast<int>(valid))
      : "memory");
}

// Two 16-bit values at a time: the parts of a query below and above zero. NaN stays NaN.
template <typename T>
__device__ __forceinline__ uint32_t PartOf(uint32_t query, bool above);
template <>
__device__ __forceinline__ uint32_t PartOf<__half>(uint32_t query, bool above) {
  const __half2 x = *reinterpret_cast<const __half2*>(&query), zero = __float2half2_rn(0.0f);
  const __half2 part = above ? __hmax2_nan(x, zero) : __hmin2_nan(x, zero);
  return *reinterpret_cast<const uint32_t*>(&part);
}
template <>
__device__ __forceinline__ uint32_t PartOf<__nv_bfloat16>(uint32_t query, bool above) {
  const __nv_bfloat162 x = *reinterpret_cast<const __nv_bfloat162*>(&query), zero = __float2bfloat162_rn(0.0f);
  const __nv_bfloat162 part = above ? __hmax2_nan(x, zero) : __hmin2_nan(x, zero);
  return *reinterpret_cast<const uint32_t*>(&part);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_LOADS_CUH_
