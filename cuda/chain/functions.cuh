// SPDX-License-Identifier: Apache-2.0
// What the kernels of chains compute with, the interpreting one and those made from a description. The text of this
// file begins every source that is made (cmake/embed_text.cmake): it includes nothing, and needs what NVRTC has built
// in.
#ifndef STOF_CUDA_CHAIN_FUNCTIONS_CUH_
#define STOF_CUDA_CHAIN_FUNCTIONS_CUH_

namespace stof {
namespace cuda {
namespace chain {

// ---- functions of fp32 ----
__device__ __forceinline__ float Infinity() { return __int_as_float(0x7f800000); }
// Of [1, 2]: an approximation and a step of Newton's.
__device__ __forceinline__ float Inverse(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return fmaf(fmaf(-x, r, 1.0f), r, r);
}
__device__ __forceinline__ float Sigmoid(float x) {
  const float e = expf(-fabsf(x));
  return (x < 0.0f ? e : 1.0f) * Inverse(1.0f + e);
}
__device__ __forceinline__ float Silu(float x) { return x * Sigmoid(x); }
__device__ __forceinline__ float Softplus(float x) { return (x < 0.0f ? 0.0f : x) + log1pf(expf(-fabsf(x))); }
__device__ __forceinline__ float Relu(float x) { return x < 0.0f ? 0.0f : x; }
__device__ __forceinline__ float Rsqrt(float x) { return 1.0f / sqrtf(x); }
// Exact to units of x, not of the result, where that nearly vanishes.
__device__ __forceinline__ float Gelu(float x) {
  const float half = 0.5f * x;
  return fmaf(half, erff(0.70710678118654752f * x), half);
}
__device__ __forceinline__ float GeluTanh(float x) {
  return x * Sigmoid(1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f));
}
// NaN where one is.
__device__ __forceinline__ float Min(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
__device__ __forceinline__ float Max(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}
// a / b where many a share b: `inverse` is 1 / b, `fits` that neither is near the ends of fp32. A product, and its rest
// divided again; far off, or of infinities, the division itself.
__device__ __forceinline__ bool Fits(float b) { return fabsf(b) > 0x1p-60f && fabsf(b) < 0x1p60f; }
__device__ __forceinline__ float Over(float a, float b, float inverse, bool fits) {
  const float quotient = a * inverse;
  if (!fits || !(fabsf(quotient) < 0x1p120f)) return a / b;
  return fmaf(fmaf(-b, quotient, a), inverse, quotient);
}

// ---- types of elements ----
struct F32 {
  static constexpr int kBytes = 4;
};
struct F16 {
  static constexpr int kBytes = 2;
};
struct BF16 {
  static constexpr int kBytes = 2;
};

template <class E>
struct Bits;
template <>
struct Bits<F32> {
  static __device__ __forceinline__ float Of(const unsigned* words, int i) { return __uint_as_float(words[i]); }
  static __device__ __forceinline__ float At(const char* from) { return __ldg(reinterpret_cast<const float*>(from)); }
  static __device__ __forceinline__ unsigned Two(float low, float) { return __float_as_uint(low); }
  static __device__ __forceinline__ void Put(char* to, float x) { *reinterpret_cast<float*>(to) = x; }
};
template <>
struct Bits<F16> {
  static __device__ __forceinline__ float Half(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
  static __device__ __forceinline__ float Of(const unsigned* words, int i) {
    return Half(static_cast<unsigned short>(i % 2 != 0 ? words[i / 2] >> 16 : words[i / 2] & 0xffffu));
  }
  static __device__ __forceinline__ float At(const char* from) {
    return Half(__ldg(reinterpret_cast<const unsigned short*>(from)));
  }
  static __device__ __forceinline__ unsigned Two(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ void Put(char* to, float x) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(Two(x, 0.0f));
  }
};
template <>
struct Bits<BF16> {
  static __device__ __forceinline__ float Of(const unsigned* words, int i) {
    return __uint_as_float(i % 2 != 0 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
  }
  static __device__ __forceinline__ float At(const char* from) {
    const unsigned bits = __ldg(reinterpret_cast<const unsigned short*>(from));
    return __uint_as_float(bits << 16);
  }
  static __device__ __forceinline__ unsigned Two(float low, float high) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ void Put(char* to, float x) {
    *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(Two(x, 0.0f));
  }
};
template <class E>
__device__ __forceinline__ float Round(float x) {
  const unsigned bits = Bits<E>::Two(x, 0.0f);
  return Bits<E>::Of(&bits, 0);
}

// ---- neighbouring elements, as words; kWidth: bytes of an access ----
template <int kWords>
__device__ __forceinline__ void Zero(unsigned (&words)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = 0;
}
template <int kWidth, int kWords>
__device__ __forceinline__ void Load(unsigned (&words)[kWords], const char* from) {
  if constexpr (kWidth == 16) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 four = __ldg(reinterpret_cast<const uint4*>(from + 4 * i));
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else if constexpr (kWidth == 8) {
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from + 4 * i));
      words[i] = two.x, words[i + 1] = two.y;
    }
  } else if constexpr (kWidth == 4) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(reinterpret_cast<const unsigned*>(from + 4 * i));
  } else {
    static_assert(kWords == 1, "one element");
    words[0] = __ldg(reinterpret_cast<const unsigned short*>(from));
  }
}
template <class E, int kWidth, int kElements>
__device__ __forceinline__ void Store(char* to, const float (&x)[kElements]) {
  constexpr int kOfWord = 4 / E::kBytes;
  if constexpr (kElements * E::kBytes < 4) {
    Bits<E>::Put(to, x[0]);
  } else {
    unsigned words[kElements / kOfWord];
#pragma unroll
    for (int i = 0; i < kElements / kOfWord; ++i) {
      words[i] = Bits<E>::Two(x[i * kOfWord], x[i * kOfWord + kOfWord - 1]);
    }
#pragma unroll
    for (int i = 0; i < kElements / kOfWord; i += kWidth / 4) {
      if constexpr (kWidth == 16) {
        *reinterpret_cast<uint4*>(to + 4 * i) = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      } else if constexpr (kWidth == 8) {
        *reinterpret_cast<uint2*>(to + 4 * i) = make_uint2(words[i], words[i + 1]);
      } else {
        *reinterpret_cast<unsigned*>(to + 4 * i) = words[i];
      }
    }
  }
}

// ---- sums and limits of rows ----
struct Sum {
  static __device__ __forceinline__ float Start() { return 0.0f; }
  static __device__ __forceinline__ float Join(float a, float b) { return a + b; }
  static __device__ __forceinline__ double Join(double a, double b) { return a + b; }
};
struct Most {
  static __device__ __forceinline__ float Start() { return -Infinity(); }
  static __device__ __forceinline__ float Join(float a, float b) { return Max(a, b); }
};
struct Least {
  static __device__ __forceinline__ float Start() { return Infinity(); }
  static __device__ __forceinline__ float Join(float a, float b) { return Min(a, b); }
};
// As a tree, for the sake of its error.
template <class Op, int kCount>
__device__ __forceinline__ float Tree(const float* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    return Op::Join(Tree<Op, (kCount + 1) / 2>(x), Tree<Op, kCount / 2>(x + (kCount + 1) / 2));
  }
}
// Of kLanes neighbouring lanes, a power of two; all of them get it.
template <class Op, int kLanes, class T>
__device__ __forceinline__ T AcrossLanes(T x) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned mask = kLanes == 32 ? 0xffffffffu : ((1u << (kLanes % 32)) - 1) << (lane / kLanes * kLanes);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = Op::Join(x, __shfl_xor_sync(mask, x, step));
  return x;
}
// Of all kThreads threads of the CTA. shared: memory that nothing else uses.
template <class Op, int kThreads, class T>
__device__ __forceinline__ T AcrossCta(T x, T* shared) {
  x = AcrossLanes<Op, 32>(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return AcrossLanes<Op, kThreads / 32>(shared[threadIdx.x % (kThreads / 32)]);
}

// ---- indices ----
// x / divisor for 0 <= x < 2^31 by the factor and shift that the host found.
__device__ __forceinline__ int Quotient(int x, long long factor, long long shift) {
  const unsigned high = __umulhi(static_cast<unsigned>(x), static_cast<unsigned>(factor));
  return static_cast<int>((high + static_cast<unsigned>(x)) >> static_cast<int>(shift));
}
template <class I>
__device__ __forceinline__ I FloorQuotient(I x, I by) {
  const I quotient = x / by;
  return quotient * by > x ? quotient - 1 : quotient;
}
template <class I>
__device__ __forceinline__ I FloorRest(I x, I by) {
  return x - FloorQuotient(x, by) * by;
}

}  // namespace chain
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_FUNCTIONS_CUH_
