// SPDX-License-Identifier: Apache-2.0
// What happens to a product before it is written.
#ifndef STOF_CUDA_GEMM_TAIL_CUH_
#define STOF_CUDA_GEMM_TAIL_CUH_

#include "cuda/gemm.h"
#include "cuda/mma_sm80.cuh"
#include "plugins/core/gemm_activation.h"

namespace stof {
namespace cuda {

__device__ __forceinline__ float FastReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x / (1 + 2^-s).
__device__ __forceinline__ float Gated(float x, float s) { return x * FastReciprocal(1.0f + Exp2(-s)); }

__device__ __forceinline__ float Silu(float x) { return Gated(x, 1.44269504f * x); }

// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): what the form by tanh is.
__device__ __forceinline__ float GeluTanh(float x) { return Gated(x, x * fmaf(0.102943231f, x * x, 2.30220820f)); }

// x Phi(x) = x / (1 + e^-p(x)) with p = log(Phi / (1 - Phi)), an odd function: p(x) / x as a polynomial in x^2, fitted
// on [0, 6] for the least relative error of the result (1.0e-4 where it exceeds 6e-5 in magnitude, 4e-4 up to 6; below
// -6 the result errs by less than 1e-8). In units of log 2.
__device__ __forceinline__ float GeluErf(float x) {
  constexpr float kL = 1.44269504f;
  const float t = fminf(x * x, 36.0f);
  float r = -2.0347777282547774e-11f * kL;
  r = fmaf(r, t, 2.9755138353237953e-09f * kL);
  r = fmaf(r, t, -1.7749268010902597e-07f * kL);
  r = fmaf(r, t, 5.433495061879512e-06f * kL);
  r = fmaf(r, t, -8.010370220290497e-05f * kL);
  r = fmaf(r, t, -0.00023874244652688503f * kL);
  r = fmaf(r, t, 0.07308090478181839f * kL);
  r = fmaf(r, t, 1.5954891443252563f * kL);
  return Gated(x, x * r);
}

// The activation of some elements; which one is the same for all threads.
template <int kCount>
__device__ __forceinline__ void Activate(int activation, float (&x)[kCount]) {
  switch (static_cast<GemmActivation>(activation)) {
    case GemmActivation::kRelu:
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
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
#endif  // STOF_CUDA_GEMM_TAIL_CUH_
