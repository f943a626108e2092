// SPDX-License-Identifier: Apache-2.0
// What happens to a matmul before it is written.
#ifndef STOF_CUDA_GEMM_EPILOGUE_CUH_
#define STOF_CUDA_GEMM_EPILOGUE_CUH_

#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"
#include "cuda/gemm/params.h"
#include "plugins/core/gemm/activation.h"

namespace stof {
namespace cuda {

__device__ __forceinline__ float FastReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of x and 0, NaN for NaN.
__device__ __forceinline__ float Relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

// x / (1 + 2^-s).
__device__ __forceinline__ float Gated(float x, float s) { return x * FastReciprocal(1.0f + Exp2(-s)); }

__device__ __forceinline__ float Silu(float x) { return Gated(x, kLog2E * x); }

// x F(x) of a distribution F that is symmetric about 0: max(x, 0) - z F(-z) with z = |x|. F(-z) is a power of two whose
// logarithm is a polynomial of z, fitted on [0, 6] for the least relative error of the result where that exceeds 6e-5
// in magnitude; below -6 it errs by less than 1e-8. One function of the special unit, where x / (1 + e^-s) has two.
template <int kCount>
__device__ __forceinline__ float Weighed(float x, const float (&coefficients)[kCount]) {
  const float z = fminf(fabsf(x), 6.0f);
  float r = coefficients[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) r = fmaf(r, z, coefficients[i]);
  return fmaf(-z, Exp2(r), Relu(x));
}

// F is the normal distribution. Relative error 1.4e-4.
__device__ __forceinline__ float GeluErf(float x) {
  return Weighed(x, {-0.0003113559737431749f, 0.0057379572084376605f, -0.04793330728455345f, -0.4645431176102417f,
                     -1.1489664138310791f, -1.0001409735608364f});
}

// F is (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. Relative error 1.5e-4.
__device__ __forceinline__ float GeluTanh(float x) {
  return Weighed(x, {0.0003686406450176138f, -0.004854356252953705f, 0.016593369236778486f, -0.05630803714141539f,
                     -0.4615635880830997f, -1.148862404478067f, -1.000205528604468f});
}

// The activation of some elements; which one is the same for all threads.
template <int kCount>
__device__ __forceinline__ void Activate(int activation, float (&x)[kCount]) {
  switch (static_cast<GemmActivation>(activation)) {
    case GemmActivation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = Relu(x[i]);
      break;
    case GemmActivation::kGelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = GeluErf(x[i]);
      break;
    case GemmActivation::kGeluTanh:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = GeluTanh(x[i]);
      break;
    case GemmActivation::kSilu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = Silu(x[i]);
      break;
    default:
      break;
  }
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
