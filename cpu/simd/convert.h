// SPDX-License-Identifier: Apache-2.0
// Rows of fp16 and bf16 to fp32 and back, rounding to nearest even.
#ifndef STOF_CPU_SIMD_CONVERT_H_
#define STOF_CPU_SIMD_CONVERT_H_

#include <cstdint>
#include <cstring>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(STOF_NEON)
#include <arm_neon.h>
#endif

#include "plugins/core/base/types.h"

namespace stof {
namespace cpu {
namespace {

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t ToBits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float HalfToFloat(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t body = half & 0x7fffu;
  if (body >= 0x7c00u) return FromBits(sign | 0x7f800000u | ((body & 0x3ffu) << 13));
  // 2^112 moves the exponent's bias from 15 to 127, and normalizes subnormals on the way.
  return FromBits(sign | ToBits(FromBits(body << 13) * 0x1p112f));
}

inline uint16_t FloatToHalf(float x) {
  const uint32_t bits = ToBits(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t body = bits & 0x7fffffffu;
  if (body > 0x7f800000u) return sign | 0x7e00u;
  if (body >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to infinity
  if (body < 0x38800000u) {
    // Subnormal: adding 0.5 leaves units of 2^-24 in the low bits, rounded to nearest even.
    return sign | static_cast<uint16_t>(ToBits(FromBits(body) + 0.5f) - 0x3f000000u);
  }
  return sign | static_cast<uint16_t>((body - 0x38000000u + 0xfffu + ((body >> 13) & 1u)) >> 13);
}

inline float Bfloat16ToFloat(uint16_t x) { return FromBits(static_cast<uint32_t>(x) << 16); }

inline uint16_t FloatToBfloat16(float x) {
  const uint32_t bits = ToBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float ToFloat(const void* source, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(source)[i];
  const uint16_t x = static_cast<const uint16_t*>(source)[i];
  return dtype == DType::kF16 ? HalfToFloat(x) : Bfloat16ToFloat(x);
}

inline void ToFloats(const void* source, DType dtype, int64_t count, float* to) {
  int64_t i = 0;
  if (dtype == DType::kF32) {
    std::memcpy(to, source, static_cast<size_t>(count) * 4);
    return;
  }
  const uint16_t* from = static_cast<const uint16_t*>(source);
  if (dtype == DType::kF16) {
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
    }
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
#elif defined(STOF_NEON)
    for (; i + 4 <= count; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
    for (; i < count; ++i) to[i] = HalfToFloat(from[i]);
    return;
  }
  for (; i < count; ++i) to[i] = Bfloat16ToFloat(from[i]);  // compilers vectorize this one
}

inline void FromFloats(const float* from, DType dtype, int64_t count, void* target) {
  int64_t i = 0;
  if (dtype == DType::kF32) {
    std::memcpy(target, from, static_cast<size_t>(count) * 4);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(target);
  if (dtype == DType::kF16) {
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    }
#elif defined(STOF_NEON)
    for (; i + 4 <= count; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
    for (; i < count; ++i) to[i] = FloatToHalf(from[i]);
    return;
  }
  for (; i < count; ++i) to[i] = FloatToBfloat16(from[i]);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_CONVERT_H_
