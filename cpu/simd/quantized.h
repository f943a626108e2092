// SPDX-License-Identifier: Apache-2.0
// int8 and fp8 (e4m3fn) to fp32 and back.
#ifndef STOF_CPU_SIMD_QUANTIZED_H_
#define STOF_CPU_SIMD_QUANTIZED_H_

#include <cstdint>

#include "cpu/simd/convert.h"
#include "cpu/simd/simd.h"
#include "plugins/core/base/float8.h"
#include "plugins/core/contract/kv_scale.h"

namespace stof {
namespace cpu {
namespace {

inline float ToFloat(int8_t x) { return static_cast<float>(x); }
inline float ToFloat(Float8 x) {
  const uint32_t body = x.bits & 0x7fu, exponent = body >> 3;
  if (body == 0x7fu) return __builtin_nanf("");
  // No subnormal fp32 on the way: a runtime may have them flushed to zero.
  const auto significand = static_cast<float>((body & 7u) | (exponent > 0 ? 8u : 0u));
  const float magnitude = significand * FromBits(((exponent > 0 ? exponent : 1u) + 117u) << 23);
  return (x.bits & 0x80u) != 0 ? -magnitude : magnitude;
}

// Nearest even within [-128, 127]; NaN becomes 127, as in ONNX Runtime.
inline int8_t FloatToInt8(float x) {
  x = x < 127.0f ? x : 127.0f;
  x = x > -128.0f ? x : -128.0f;
  // Adding 1.5 * 2^23 leaves the integer in the low bits.
  return static_cast<int8_t>(static_cast<int32_t>(ToBits(x + 12582912.0f) - 0x4b400000u));
}

// Nearest even within [-448, 448]; NaN stays NaN.
inline Float8 FloatToFloat8(float x) {
  const uint32_t bits = ToBits(x), body = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  if (body > 0x7f800000u) return {static_cast<uint8_t>(sign | 0x7fu)};
  if (body >= 0x43e00000u) return {static_cast<uint8_t>(sign | 0x7eu)};
  if (body < 0x3c800000u) {
    // Subnormal: adding 2^14 leaves units of 2^-9 in the low bits.
    return {static_cast<uint8_t>(sign | (ToBits(FromBits(body) + 16384.0f) - 0x46800000u))};
  }
  return {static_cast<uint8_t>(sign | (body - 0x3c000000u + 0x7ffffu + (body >> 20 & 1u)) >> 20)};
}

// Float8ToScaledHalf: fp8 as fp16 that is 2^8 times smaller; NaN stays NaN. Subnormals are exact.
#if defined(__AVX2__)
inline __m256i Float8ToScaledHalf(__m256i extended) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(extended, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i most = _mm256_set1_epi16(0x3f80);
  const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, most), most);
  return _mm256_or_si256(half, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7e00)));
}
#elif defined(STOF_NEON)
inline float16x4_t Float8ToScaledHalf(int16x4_t extended) {
  const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vshl_n_s16(extended, 7)), vdup_n_u16(0xbf80));
  const uint16x4_t most = vdup_n_u16(0x3f80);
  const uint16x4_t is_nan = vceq_u16(vand_u16(half, most), most);
  return vreinterpret_f16_u16(vorr_u16(half, vand_u16(is_nan, vdup_n_u16(0x7e00))));
}
// Four bytes, each of them extended to 16 bits.
inline int16x4_t ExtendFourBytes(const void* from) {
  return vget_low_s16(vmovl_s8(vreinterpret_s8_u8(LoadFourBytes(from))));
}
#endif

// A vector of stored values.
inline V LoadFloats(const float* from) { return Simd::Load(from); }
#if defined(__AVX512F__)
inline V LoadFloats(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline V LoadFloats(const Float8* from) {
  const __m256i half =
      Float8ToScaledHalf(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
#elif defined(__AVX2__)
inline V LoadFloats(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline V LoadFloats(const Float8* from) {
  const __m256i half =
      Float8ToScaledHalf(_mm256_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_set1_ps(256.0f));
}
#elif defined(STOF_NEON)
inline V LoadFloats(const int8_t* from) { return vcvtq_f32_s32(vmovl_s16(ExtendFourBytes(from))); }
inline V LoadFloats(const Float8* from) {
  return vmulq_n_f32(vcvt_f32_f16(Float8ToScaledHalf(ExtendFourBytes(from))), 256.0f);
}
#else
template <typename Stored>
inline V LoadFloats(const Stored* from) {
  float x[kWidth];
  for (int i = 0; i < kWidth; ++i) x[i] = ToFloat(from[i]);
  return Simd::Load(x);
}
#endif

template <typename Stored>
inline void StoredToFloats(const Stored* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) Simd::Store(to + i, LoadFloats(from + i));
  for (; i < count; ++i) to[i] = ToFloat(from[i]);
}

// Calls use(data) with data as fp32, int8 or fp8 values.
template <typename Use>
inline void AsStored(const void* data, DType dtype, const Use& use) {
  if (dtype == DType::kI8) return use(static_cast<const int8_t*>(data));
  if (dtype == DType::kF8E4M3) return use(static_cast<const Float8*>(data));
  use(static_cast<const float*>(data));
}

// Values of any type that keys and values may have.
inline void KvToFloats(const void* source, DType dtype, int64_t count, float* to) {
  if (dtype == DType::kI8) return StoredToFloats(static_cast<const int8_t*>(source), count, to);
  if (dtype == DType::kF8E4M3) return StoredToFloats(static_cast<const Float8*>(source), count, to);
  ToFloats(source, dtype, count, to);
}

// Rounds x * inverse to one of kQuantizedTypes, element by element.
inline void QuantizeRow(const float* x, const float* inverse, DType dtype, int64_t count, void* target) {
  if (dtype == DType::kI8) {
    auto* const to = static_cast<int8_t*>(target);
    for (int64_t i = 0; i < count; ++i) to[i] = FloatToInt8(x[i] * inverse[i]);
    return;
  }
  auto* const to = static_cast<Float8*>(target);
  for (int64_t i = 0; i < count; ++i) to[i] = FloatToFloat8(x[i] * inverse[i]);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_QUANTIZED_H_
