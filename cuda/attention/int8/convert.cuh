// SPDX-License-Identifier: Apache-2.0
// Conversions of the quantization: 16-bit numbers to fp32, fp32 to fp8.
#ifndef STOF_CUDA_ATTENTION_INT8_CONVERT_CUH_
#define STOF_CUDA_ATTENTION_INT8_CONVERT_CUH_

#include <cstdint>

#include "cuda/common/mma_sm90.cuh"

namespace stof {
namespace cuda {

// Four numbers in e4m3, the first in the lowest byte; rounds to nearest even, up to 448 at most. Devices before 8.9
// lack the instruction, and have no kernel that takes values in fp8.
__device__ __forceinline__ uint32_t PackFp8(float x0, float x1, float x2, float x3) {
  uint32_t word = 0;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(word)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
#endif
  return word;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_CONVERT_CUH_
