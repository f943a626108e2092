// SPDX-License-Identifier: Apache-2.0
// Wrappers of 8-bit wgmma of compute capability 9.0a, and of bulk copies.
#ifndef STOF_CUDA_ATTENTION_SM90_INT8_MMA_CUH_
#define STOF_CUDA_ATTENTION_SM90_INT8_MMA_CUH_

#include <cstdint>

#include "cuda/common/mma_sm90.cuh"

namespace stof {
namespace cuda {

// Loads bytes, a multiple of 16 at an aligned address; they complete on the barrier.
__device__ __forceinline__ void CopyBytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}

// The operand of a descriptor's low word whose swizzled rows have kSpan bytes, 128 or 64. Eight rows are an atom.
template <int kSpan>
__device__ __forceinline__ uint64_t InnerOperand(uint32_t low) {
  static_assert(kSpan == 128 || kSpan == 64, "rows of a swizzle");
  return uint64_t{8 * kSpan >> 4 | (kSpan == 128 ? 1u : 2u) << 30} << 32 | low;
}

#define STOF_B4(c, i)                                                                   \
  "+r"(reinterpret_cast<uint32_t&>(c[i])), "+r"(reinterpret_cast<uint32_t&>(c[i + 1])), \
      "+r"(reinterpret_cast<uint32_t&>(c[i + 2])), "+r"(reinterpret_cast<uint32_t&>(c[i + 3]))
#define STOF_B16(c, i) STOF_B4(c, i), STOF_B4(c, i + 4), STOF_B4(c, i + 8), STOF_B4(c, i + 12)
#define STOF_B64(c) STOF_B16(c, 0), STOF_B16(c, 16), STOF_B16(c, 32), STOF_B16(c, 48)

// c[64 x 128] += a[64 x 32] · b[128 x 32]ᵀ in int8, both K-major in shared memory. c has the bits of int32.
__device__ __forceinline__ void WgmmaInt8(float (&c)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 " STOF_R64 ", %64, %65, add;\n}\n"
      : STOF_B64(c)
      : "l"(a), "l"(b));
}

// c[64 x 64] (+)= a[64 x 32] · b[64 x 32]ᵀ in e4m3, a in registers, b K-major in shared memory. Register 2 i + r of a
// has columns 16 i + 4 t to 16 i + 4 t + 3 of the thread's row r.
__device__ __forceinline__ void WgmmaFp8(float (&c)[32], const uint32_t* a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " STOF_R32 ", {%32, %33, %34, %35}, %36, add, 1, 1;\n}\n"
      : STOF_F32(c)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}
#undef STOF_B4
#undef STOF_B16
#undef STOF_B64

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_INT8_MMA_CUH_
