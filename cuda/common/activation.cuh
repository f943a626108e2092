// SPDX-License-Identifier: Apache-2.0
// Activations on a device, by the names of plugins/core/base/activation.h: to fp32's accuracy, and faster ones for
// results of 16 bits. Kernels made of chains have their own (cuda/chain/functions.cuh), a text that includes nothing.
#ifndef STOF_CUDA_COMMON_ACTIVATION_CUH_
#define STOF_CUDA_COMMON_ACTIVATION_CUH_

#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"
#include "plugins/core/base/activation.h"

namespace stof {
namespace cuda {

// Errors are small beside x, not beside a result that nearly vanishes. NaN stays NaN.
struct Fp32Activations {
  static __device__ __forceinline__ float None(float x) { return x; }
  static __device__ __forceinline__ float Relu(float x) { return x < 0.0f ? 0.0f : x; }
  static __device__ __forceinline__ float Relu2(float x) {
    const float positive = Relu(x);
    return positive * positive;
  }
  static __device__ __forceinline__ float Gelu(float x) { return 0.5f * x * erfcf(-0.70710678118654752f * x); }
  static __device__ __forceinline__ float GeluTanh(float x) {
    return x / (1.0f + expf(-1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f)));
  }
  static __device__ __forceinline__ float Silu(float x) { return x / (1.0f + expf(-x)); }
};

// For results that are rounded to fp16 or bf16.
struct Fp16Activations {
  static __device__ __forceinline__ float None(float x) { return x; }
  // The larger of x and 0, NaN for NaN.
  static __device__ __forceinline__ float Relu(float x) {
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
  }
  static __device__ __forceinline__ float Relu2(float x) {
    const float positive = Relu(x);
    return positive * positive;
  }
  // x F(x), where F is the normal distribution. Relative error 1.4e-4.
  static __device__ __forceinline__ float Gelu(float x) {
    return MultiplyByDistribution(x, {-0.0003113559737431749f, 0.0057379572084376605f, -0.04793330728455345f,
                                      -0.4645431176102417f, -1.1489664138310791f, -1.0001409735608364f});
  }
  // x F(x), where F is (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2. Relative error 1.5e-4.
  static __device__ __forceinline__ float GeluTanh(float x) {
    return MultiplyByDistribution(
        x, {0.0003686406450176138f, -0.004854356252953705f, 0.016593369236778486f, -0.05630803714141539f,
            -0.4615635880830997f, -1.148862404478067f, -1.000205528604468f});
  }
  static __device__ __forceinline__ float Silu(float x) { return x * FastReciprocal(1.0f + Exp2(-(kLog2E * x))); }

 private:
  static __device__ __forceinline__ float FastReciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  // x F(x) of a distribution F that is symmetric about 0: max(x, 0) - z F(-z) with z = |x|. F(-z) is a power of two
  // whose logarithm is a polynomial of z, fitted on [0, 6] for the least relative error of the result where that
  // exceeds 6e-5 in magnitude; below -6 it errs by less than 1e-8. One function of the special unit, where x / (1 +
  // e^-s) has two.
  template <int kCount>
  static __device__ __forceinline__ float MultiplyByDistribution(float x, const float (&coefficients)[kCount]) {
    const float z = fminf(fabsf(x), 6.0f);
    float r = coefficients[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) r = fmaf(r, z, coefficients[i]);
    return fmaf(-z, Exp2(r), Relu(x));
  }
};

// Applies an activation of Functions, one of the structs above, to some elements.
template <typename Functions, int kCount>
__device__ __forceinline__ void Activate(Activation activation, float (&x)[kCount]) {
  switch (activation) {
#define STOF_CASE(function, ...)                                                         \
  case Activation::k##function:                                                          \
    _Pragma("unroll") for (int i = 0; i < kCount; ++i) x[i] = Functions::function(x[i]); \
    break;
    STOF_ACTIVATIONS(STOF_CASE)
#undef STOF_CASE
  }
}
template <typename Functions>
__device__ __forceinline__ float Activate(Activation activation, float x) {
  float one[1] = {x};
  Activate<Functions>(activation, one);
  return one[0];
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_ACTIVATION_CUH_
