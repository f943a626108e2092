// SPDX-License-Identifier: Apache-2.0
// Loads of the split-KV decode kernel.
#ifndef STOF_CUDA_ATTENTION_DECODE_LOAD_ONCE_CUH_
#define STOF_CUDA_ATTENTION_DECODE_LOAD_ONCE_CUH_

#include <cuda_runtime.h>

#include <cstdint>

namespace stof {
namespace cuda {

// Loads 16 or 8 bytes that are read once; zeros where not `valid`.
__device__ __forceinline__ void LoadOnce(uint32_t (&r)[4], const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %5, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(r[0]), "=&r"(r[1]), "=&r"(r[2]), "=&r"(r[3])
      : "l"(from), "r"(static_cast<int>(valid)));
}
__device__ __forceinline__ void LoadOnce(uint32_t (&r)[2], const void* from, bool valid) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nmov.u32 %0, 0;\nmov.u32 %1, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
      : "=&r"(r[0]), "=&r"(r[1])
      : "l"(from), "r"(static_cast<int>(valid)));
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_LOAD_ONCE_CUH_
