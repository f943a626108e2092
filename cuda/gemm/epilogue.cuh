// SPDX-License-Identifier: Apache-2.0
// What happens to a matmul before it is written.
#ifndef STOF_CUDA_GEMM_EPILOGUE_CUH_
#define STOF_CUDA_GEMM_EPILOGUE_CUH_

#include "cuda/common/activation.cuh"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"
#include "cuda/gemm/params.h"

namespace stof {
namespace cuda {

// The activation of some elements; which one is the same for all threads.
template <int kCount>
__device__ __forceinline__ void Activate(int activation, float (&x)[kCount]) {
  Activate<Fp16Activations>(static_cast<Activation>(activation), x);
}

template <typename T>
__device__ __forceinline__ void UnpackPair(uint32_t pair, float* low, float* high) {
  const T* const halves = reinterpret_cast<const T*>(&pair);
  *low = ToFloat(halves[0]);
  *high = ToFloat(halves[1]);
}

// Two neighbours of memory that no kernel in flight writes.
__device__ __forceinline__ uint32_t LoadPair(const void* base, int64_t element) {
  uint32_t pair;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(pair) : "l"(static_cast<const uint16_t*>(base) + element));
  return pair;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_EPILOGUE_CUH_
