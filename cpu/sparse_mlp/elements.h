// SPDX-License-Identifier: Apache-2.0
// Values of weights as vectors of fp32, by the type that they are stored in.
#ifndef STOF_CPU_SPARSE_MLP_ELEMENTS_H_
#define STOF_CPU_SPARSE_MLP_ELEMENTS_H_

#include <cstdint>

#include "cpu/simd/algorithms.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/lanes.h"
#include "cpu/simd/prefetch.h"
#include "cpu/simd/simd.h"
#include "cpu/sparse_mlp/sparse_mlp.h"

namespace stof {
namespace cpu {
namespace {

static_assert(kMlpPadding % kWidth == 0, "vectors of tokens are padded to whole vectors");

// Prefetches the start of a row that is read next. The hardware prefetches the rest of it, and faster.
inline void PrefetchStart(const char* row) {
  constexpr int64_t kLine = 64, kLines = 4;
  for (int64_t i = 0; i < kLines; ++i) __builtin_prefetch(row + i * kLine, 0, 2);
}

struct Fp32Element {
  using T = float;
  static constexpr DType kType = DType::kF32;
  static V Load(const T* p) { return Simd::Load(p); }
};

struct Fp16Element {
  using T = uint16_t;
  static constexpr DType kType = DType::kF16;
  static V Load(const T* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(STOF_NEON)
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    float x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = HalfToFloat(p[i]);
    return Simd::Load(x);
#endif
  }
};

struct Bf16Element {
  using T = uint16_t;
  static constexpr DType kType = DType::kBF16;
  static V Load(const T* p) {
#if defined(__AVX512F__)
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
#elif defined(__AVX2__)
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
#elif defined(STOF_NEON)
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
#else
    float x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = Bfloat16ToFloat(p[i]);
    return Simd::Load(x);
#endif
  }
};

// The first `count` values, zeros beyond.
template <typename E>
inline V LoadFirst(const typename E::T* p, int64_t count) {
  float x[kWidth] = {};
  ToFloats(p, E::kType, count, x);
  return Simd::Load(x);
}

// Calls function(E()) for the element type of a dtype.
template <typename Function>
inline void WithElement(DType dtype, Function function) {
  if (dtype == DType::kF16) return function(Fp16Element());
  if (dtype == DType::kBF16) return function(Bf16Element());
  return function(Fp32Element());
}

// kWidth bytes, each a value.
inline V FromBytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#elif defined(STOF_NEON)
  return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(LoadFourBytes(p)))));
#else
  float x[kWidth];
  for (int i = 0; i < kWidth; ++i) x[i] = p[i];
  return Simd::Load(x);
#endif
}

// to[16] = the values of 8 bytes, two in a byte, the first one in the low half.
inline void SplitBytes(const uint8_t* p, uint8_t* to) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i low = _mm_and_si128(bytes, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi8(low, high));
#elif defined(STOF_NEON)
  const uint8x8_t bytes = vld1_u8(p);
  const uint8x8x2_t values = {{vand_u8(bytes, vdup_n_u8(15)), vshr_n_u8(bytes, 4)}};
  vst2_u8(to, values);
#else
  for (int i = 0; i < 8; ++i) to[2 * i] = p[i] & 15, to[2 * i + 1] = p[i] >> 4;
#endif
}

inline uint8_t QuantizedAt(const uint8_t* row, int bits, int64_t i) {
  return bits == 8 ? row[i] : static_cast<uint8_t>(row[i / 2] >> (i % 2 * 4) & 15);
}

// to[0, depth) = values k0 ... of a gate, up or predictor row; k0 is a multiple of every block size. `to` has room up
// to a multiple of kMlpPadding: of quantized rows, the padding of the last block is written, too. (q - zero point) *
// scale is rounded once, as ONNX Runtime dequantizes.
inline void LoadRow(const NeuronRows& rows, int64_t neuron, int64_t k0, int64_t depth, float* to) {
  const char* const row = rows.data + neuron * rows.stride;
  const int64_t padded = (depth + kMlpPadding - 1) / kMlpPadding * kMlpPadding;
  if (rows.bits == 0) {
    const int64_t size = SizeOf(rows.dtype);
    ToFloats(row + k0 * size, rows.dtype, depth, to);
    return;
  }
  const int64_t blocks = rows.blocks;
  const int64_t zero_bytes = (blocks * rows.bits + 7) / 8;
  const auto* values = reinterpret_cast<const uint8_t*>(row) + k0 * rows.bits / 8;
  const float usual = rows.bits == 4 ? 8.0f : 128.0f;
  uint8_t split[kMlpPadding];
  for (int64_t k = 0; k < padded; k += kMlpPadding) {
    const int64_t block = (k0 + k) >> rows.block_shift;
    const V scale = Simd::Set1(ToFloat(rows.scales, rows.dtype, neuron * blocks + block));
    const V zero = Simd::Set1(
        rows.zero_points == nullptr ? usual : QuantizedAt(rows.zero_points + neuron * zero_bytes, rows.bits, block));
    const uint8_t* bytes = values + k * rows.bits / 8;
    if (rows.bits == 4) SplitBytes(bytes, split), bytes = split;
    for (int i = 0; i < kMlpPadding; i += kWidth) {
      Simd::Store(to + k + i, Simd::Mul(Simd::Sub(FromBytes(bytes + i), zero), scale));
    }
  }
}

// to[count] = columns first ... of a down row; first is a multiple of kMlpPadding.
inline void LoadDownRow(const NeuronRows& rows, int64_t neuron, int64_t first, int64_t count, float* to) {
  const char* const row = rows.data + neuron * rows.stride;
  if (rows.bits == 0) {
    const int64_t size = SizeOf(rows.dtype);
    ToFloats(row + first * size, rows.dtype, count, to);
    return;
  }
  const int64_t group = (neuron >> rows.block_shift) * rows.size + first;
  const char* const scales = rows.scales + group * SizeOf(rows.dtype);
  const uint8_t* const zeros = rows.zero_points == nullptr ? nullptr : rows.zero_points + group;
  const auto* const values = reinterpret_cast<const uint8_t*>(row);
  const float usual = rows.bits == 4 ? 8.0f : 128.0f;
  uint8_t split[kMlpPadding];
  int64_t n = 0;
  WithElement(rows.dtype, [&](auto element) {
    using E = decltype(element);
    const auto* const scale = reinterpret_cast<const typename E::T*>(scales);
    for (; n + kMlpPadding <= count; n += kMlpPadding) {
      const uint8_t* bytes = values + (first + n) * rows.bits / 8;
      if (rows.bits == 4) SplitBytes(bytes, split), bytes = split;
      for (int i = 0; i < kMlpPadding; i += kWidth) {
        const V zero = zeros == nullptr ? Simd::Set1(usual) : FromBytes(zeros + n + i);
        Simd::Store(to + n + i, Simd::Mul(Simd::Sub(FromBytes(bytes + i), zero), E::Load(scale + n + i)));
      }
    }
  });
  for (; n < count; ++n) {
    const float zero = zeros == nullptr ? usual : static_cast<float>(zeros[n]);
    const auto value = static_cast<float>(QuantizedAt(values, rows.bits, first + n));
    to[n] = (value - zero) * ToFloat(scales, rows.dtype, n);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_ELEMENTS_H_
