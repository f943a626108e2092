// SPDX-License-Identifier: Apache-2.0
// Exact sums of products of uint8 and int8, four at a time, in the vectors of each instruction set.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_PRODUCTS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_PRODUCTS_H_

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(STOF_NEON)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

#include "cpu/simd/algorithms.h"

namespace stof {
namespace cpu {
namespace {

// A set of columns of a register block: a lane has the four values of a column that stand one behind the other. Quad:
// four values of a row, for all lanes. Without instructions for four products of bytes, both are split into 16 bits.
// kRowOffset: what is subtracted from values of rows where instructions take both factors as int8.
#if defined(__AVX512VNNI__)
struct Int8Vnni {
  static constexpr int kRowOffset = 0;
  static constexpr int kLanes = 16;
  // 6 x 4 sums, 4 columns, a quad: 29 of 32 registers.
  static constexpr int kRows = 6, kVectors = 4;
  using Sums = __m512i;
  using Columns = __m512i;
  using Quad = __m512i;
  static Sums Load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void Store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Columns LoadColumns(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Quad LoadQuad(const uint8_t* p) {
    int32_t x;
    std::memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  static Sums Dot(Sums sums, Quad quad, Columns columns) { return _mm512_dpbusd_epi32(sums, quad, columns); }
};
using Int8 = Int8Vnni;
#elif defined(__AVX512BW__)
struct Int8Avx512 {
  static constexpr int kRowOffset = 0;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6, kVectors = 2;
  using Sums = __m512i;
  struct Columns {
    __m512i even, odd;
  };
  using Quad = Columns;
  static Sums Load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void Store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Columns LoadColumns(const int8_t* p) {
    const __m512i x = _mm512_loadu_si512(p);
    return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
  }
  static Quad LoadQuad(const uint8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    const __m512i x = _mm512_set1_epi32(bits);
    return {_mm512_and_si512(x, _mm512_set1_epi16(255)), _mm512_srli_epi16(x, 8)};
  }
  static Sums Dot(Sums sums, Quad quad, Columns columns) {
    return _mm512_add_epi32(
        sums, _mm512_add_epi32(_mm512_madd_epi16(quad.even, columns.even), _mm512_madd_epi16(quad.odd, columns.odd)));
  }
};
using Int8 = Int8Avx512;
#elif defined(__AVX2__)
struct Int8Avx2 {
  static constexpr int kRowOffset = 0;
  static constexpr int kLanes = 8;
  // 4 x 2 sums, 4 columns, 2 quads: 14 of 16 registers.
  static constexpr int kRows = 4, kVectors = 2;
  using Sums = __m256i;
  struct Columns {
    __m256i even, odd;
  };
  using Quad = Columns;
  static Sums Load(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void Store(int32_t* p, Sums v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static Sums Set1(int32_t x) { return _mm256_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static Columns LoadColumns(const int8_t* p) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  static Quad LoadQuad(const uint8_t* p) {
    int32_t bits;
    std::memcpy(&bits, p, 4);
    const __m256i x = _mm256_set1_epi32(bits);
    return {_mm256_and_si256(x, _mm256_set1_epi16(255)), _mm256_srli_epi16(x, 8)};
  }
  static Sums Dot(Sums sums, Quad quad, Columns columns) {
    return _mm256_add_epi32(
        sums, _mm256_add_epi32(_mm256_madd_epi16(quad.even, columns.even), _mm256_madd_epi16(quad.odd, columns.odd)));
  }
};
using Int8 = Int8Avx2;
#elif defined(STOF_NEON) && defined(__ARM_FEATURE_DOTPROD)
struct Int8Dotprod {
  static constexpr int kRowOffset = 128;
  static constexpr int kLanes = 4;
  // 6 x 4 sums, 4 columns, a quad: 29 of 32 registers.
  static constexpr int kRows = 6, kVectors = 4;
  using Sums = int32x4_t;
  using Columns = int8x16_t;
  using Quad = int8x16_t;
  static Sums Load(const int32_t* p) { return vld1q_s32(p); }
  static void Store(int32_t* p, Sums v) { vst1q_s32(p, v); }
  static Sums Set1(int32_t x) { return vdupq_n_s32(x); }
  static Sums Add(Sums a, Sums b) { return vaddq_s32(a, b); }
  static Columns LoadColumns(const int8_t* p) { return vld1q_s8(p); }
  static Quad LoadQuad(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return vreinterpretq_s8_u32(vdupq_n_u32(x ^ 0x80808080u));
  }
  static Sums Dot(Sums sums, Quad quad, Columns columns) { return vdotq_s32(sums, quad, columns); }
};
using Int8 = Int8Dotprod;
#else
struct Int8Portable {
  static constexpr int kRowOffset = 0;
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4, kVectors = 2;
  typedef int32_t Sums __attribute__((vector_size(16)));
  struct Columns {
    Sums of[4];
  };
  struct Quad {
    int32_t of[4];
  };
  static Sums Load(const int32_t* p) {
    Sums v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(int32_t* p, Sums v) { std::memcpy(p, &v, sizeof(v)); }
  static Sums Set1(int32_t x) { return Sums{x, x, x, x}; }
  static Sums Add(Sums a, Sums b) { return a + b; }
  // The bytes of each lane, the lowest first, by shifts.
  static Columns LoadColumns(const int8_t* p) {
    typedef uint32_t Words __attribute__((vector_size(16)));
    Words x;
    std::memcpy(&x, p, sizeof(x));
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the order of bytes must be little endian"
#endif
    return {{reinterpret_cast<Sums>(x << 24) >> 24, reinterpret_cast<Sums>(x << 16) >> 24,
             reinterpret_cast<Sums>(x << 8) >> 24, reinterpret_cast<Sums>(x) >> 24}};
  }
  static Quad LoadQuad(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Sums Dot(Sums sums, const Quad& quad, const Columns& columns) {
    for (int i = 0; i < 4; ++i) sums += quad.of[i] * columns.of[i];
    return sums;
  }
};
using Int8 = Int8Portable;
#endif

template <int kVectors>
struct SumBlock {
  Int8::Sums of[Int8::kRows][kVectors];
};

// Adds quads of Int8::kRows rows times columns. Rows lie row_stride bytes apart, the quads of columns quad_stride.
template <int kVectors>
inline __attribute__((always_inline)) void AddProducts(const uint8_t* rows, int64_t row_stride, const int8_t* columns,
                                                       int64_t quad_stride, int64_t quads, SumBlock<kVectors>* sums) {
  for (int64_t q = 0; q < quads; ++q) {
    Int8::Columns loaded[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      loaded[v] = Int8::LoadColumns(columns + q * quad_stride + v * 4 * Int8::kLanes);
    }
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
      const Int8::Quad quad = Int8::LoadQuad(rows + r * row_stride + 4 * q);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums->of[r][v] = Int8::Dot(sums->of[r][v], quad, loaded[v]);
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_PRODUCTS_H_
