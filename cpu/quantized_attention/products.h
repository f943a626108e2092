// SPDX-License-Identifier: Apache-2.0
// Exact sums of products of uint8 and int8, in the vectors of each instruction set.
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
#include "cpu/simd/tiles.h"

// Tests emulate the instruction where a processor has none.
#if defined(__AVXVNNI__) || defined(STOF_EMULATED_AVX_VNNI)
#define STOF_AVX_VNNI
#endif

namespace stof {
namespace cpu {
namespace {

inline int32_t LoadWord(const void* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

// Int8 has the sums of a register block: kRows rows times kVectors vectors of kLanes columns. Products multiply words
// of 32 bits: a word of a row stands for all lanes, and a vector of columns has a word of a column in each lane.
//   ByteProducts   words of four bytes: rows are uint8, columns int8
//   KeyProducts    of queries and keys, whose values are packed into kKeyBytes bytes each
//   ShortProducts  like ByteProducts, with sums of 16 bits; Widen makes them sums of 32 bits
// kRowOffset: what is subtracted from bytes of rows where instructions take both factors as int8.
#if defined(STOF_TILES)
// Sums and products are in tile registers (tile_matmuls.h).
struct Int8Tiles {
  static constexpr int kRowOffset = 0, kKeyBytes = 1;
  static constexpr int kLanes = kSumColumns;
  static constexpr int kRows = kSumRows, kVectors = 4;
};
using Int8 = Int8Tiles;
#elif defined(__AVX512VNNI__)
struct Int8Vnni {
  static constexpr int kRowOffset = 0, kKeyBytes = 1;
  static constexpr int kLanes = 16;
  // 6 x 4 sums, 4 columns, a word of a row: 29 of 32 registers.
  static constexpr int kRows = 6, kVectors = 4;
  using Sums = __m512i;
  static Sums Load(const int32_t* p) { return _mm512_loadu_si512(p); }
  static void Store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
};
using Int8 = Int8Vnni;
struct BytesVnni {
  using Columns = __m512i;
  using Row = __m512i;
  static Columns LoadColumns(const int8_t* p) { return _mm512_loadu_si512(p); }
  static Row LoadRow(const uint8_t* p) { return _mm512_set1_epi32(LoadWord(p)); }
  static Int8::Sums Dot(Int8::Sums sums, Row row, Columns columns) { return _mm512_dpbusd_epi32(sums, row, columns); }
};
using ByteProducts = BytesVnni;
using KeyProducts = ByteProducts;
#elif defined(__AVX2__)
#if defined(__AVX512BW__)
struct Int8Avx512 {
  static constexpr int kRowOffset = 0, kKeyBytes = 2;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 6, kVectors = 2;
  using Sums = __m512i;
  static Sums Load(const void* p) { return _mm512_loadu_si512(p); }
  static void Store(int32_t* p, Sums v) { _mm512_storeu_si512(p, v); }
  static Sums Set1(int32_t x) { return _mm512_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm512_add_epi32(a, b); }
  static Sums AddShorts(Sums a, Sums b) { return _mm512_add_epi16(a, b); }
  static Sums MultiplyShorts(Sums a, Sums b) { return _mm512_madd_epi16(a, b); }
  static Sums MultiplyBytes(Sums a, Sums b) { return _mm512_maddubs_epi16(a, b); }
  static Sums EvenBytes(Sums x) { return _mm512_and_si512(x, _mm512_set1_epi16(255)); }
  static Sums OddBytes(Sums x) { return _mm512_srli_epi16(x, 8); }
  static Sums EvenSignedBytes(Sums x) { return _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8); }
  static Sums OddSignedBytes(Sums x) { return _mm512_srai_epi16(x, 8); }
};
using Int8 = Int8Avx512;
#else
struct Int8Avx2 {
#if defined(STOF_AVX_VNNI)
  static constexpr int kRowOffset = 0, kKeyBytes = 1;
  // 6 x 2 sums, 2 columns, a word of a row: 15 of 16 registers.
  static constexpr int kRows = 6, kVectors = 2;
#else
  static constexpr int kRowOffset = 0, kKeyBytes = 2;
  // 4 x 2 sums, 4 columns, 2 words of a row: 14 of 16 registers.
  static constexpr int kRows = 4, kVectors = 2;
#endif
  static constexpr int kLanes = 8;
  using Sums = __m256i;
  static Sums Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void Store(int32_t* p, Sums v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
  static Sums Set1(int32_t x) { return _mm256_set1_epi32(x); }
  static Sums Add(Sums a, Sums b) { return _mm256_add_epi32(a, b); }
  static Sums AddShorts(Sums a, Sums b) { return _mm256_add_epi16(a, b); }
  static Sums MultiplyShorts(Sums a, Sums b) { return _mm256_madd_epi16(a, b); }
  static Sums MultiplyBytes(Sums a, Sums b) { return _mm256_maddubs_epi16(a, b); }
  static Sums EvenBytes(Sums x) { return _mm256_and_si256(x, _mm256_set1_epi16(255)); }
  static Sums OddBytes(Sums x) { return _mm256_srli_epi16(x, 8); }
  static Sums EvenSignedBytes(Sums x) { return _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8); }
  static Sums OddSignedBytes(Sums x) { return _mm256_srai_epi16(x, 8); }
};
using Int8 = Int8Avx2;
#endif
// Words as they are in memory.
struct WholeWords {
  using Columns = Int8::Sums;
  using Row = Int8::Sums;
  static Columns LoadColumns(const int8_t* p) { return Int8::Load(p); }
  static Row LoadRow(const uint8_t* p) { return Int8::Set1(LoadWord(p)); }
};
#if defined(STOF_AVX_VNNI)
struct BytesAvxVnni : WholeWords {
  static Int8::Sums Dot(Int8::Sums sums, Row row, Columns columns) {
    return _mm256_dpbusd_avx_epi32(sums, row, columns);
  }
};
using ByteProducts = BytesAvxVnni;
using KeyProducts = ByteProducts;
#else
// Both factors are split into values of 16 bits.
struct BytesAsWords {
  struct Columns {
    Int8::Sums even, odd;
  };
  using Row = Columns;
  static Columns LoadColumns(const int8_t* p) {
    const Int8::Sums x = Int8::Load(p);
    return {Int8::EvenSignedBytes(x), Int8::OddSignedBytes(x)};
  }
  static Row LoadRow(const uint8_t* p) {
    const Int8::Sums x = Int8::Set1(LoadWord(p));
    return {Int8::EvenBytes(x), Int8::OddBytes(x)};
  }
  static Int8::Sums Dot(Int8::Sums sums, const Row& row, const Columns& columns) {
    return Int8::Add(
        sums, Int8::Add(Int8::MultiplyShorts(row.even, columns.even), Int8::MultiplyShorts(row.odd, columns.odd)));
  }
};
using ByteProducts = BytesAsWords;
// Words of two values of 16 bits.
struct KeyProducts : WholeWords {
  static Int8::Sums Dot(Int8::Sums sums, Row row, Columns columns) {
    return Int8::Add(sums, Int8::MultiplyShorts(row, columns));
  }
};
#define STOF_HAS_SHORT_PRODUCTS
struct ShortProducts : WholeWords {
  static Int8::Sums Dot(Int8::Sums sums, Row row, Columns columns) {
    return Int8::AddShorts(sums, Int8::MultiplyBytes(row, columns));
  }
  static Int8::Sums Widen(Int8::Sums sums) { return Int8::MultiplyShorts(sums, Int8::Set1(0x00010001)); }
};
#endif
#elif defined(STOF_NEON) && defined(__ARM_FEATURE_DOTPROD)
struct Int8Dotprod {
  static constexpr int kRowOffset = 128, kKeyBytes = 1;
  static constexpr int kLanes = 4;
  // 6 x 4 sums, 4 columns, a word of a row: 29 of 32 registers.
  static constexpr int kRows = 6, kVectors = 4;
  using Sums = int32x4_t;
  static Sums Load(const int32_t* p) { return vld1q_s32(p); }
  static void Store(int32_t* p, Sums v) { vst1q_s32(p, v); }
  static Sums Set1(int32_t x) { return vdupq_n_s32(x); }
  static Sums Add(Sums a, Sums b) { return vaddq_s32(a, b); }
};
using Int8 = Int8Dotprod;
struct BytesDotprod {
  using Columns = int8x16_t;
  using Row = int8x16_t;
  static Columns LoadColumns(const int8_t* p) { return vld1q_s8(p); }
  static Row LoadRow(const uint8_t* p) {
    return vreinterpretq_s8_u32(vdupq_n_u32(static_cast<uint32_t>(LoadWord(p)) ^ 0x80808080u));
  }
  static Int8::Sums Dot(Int8::Sums sums, Row row, Columns columns) { return vdotq_s32(sums, row, columns); }
};
using ByteProducts = BytesDotprod;
using KeyProducts = ByteProducts;
#else
struct Int8Portable {
  static constexpr int kRowOffset = 0, kKeyBytes = 1;
  static constexpr int kLanes = 4;
  static constexpr int kRows = 4, kVectors = 2;
  typedef int32_t Sums __attribute__((vector_size(16)));
  static Sums Load(const int32_t* p) {
    Sums v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(int32_t* p, Sums v) { std::memcpy(p, &v, sizeof(v)); }
  static Sums Set1(int32_t x) { return Sums{x, x, x, x}; }
  static Sums Add(Sums a, Sums b) { return a + b; }
};
using Int8 = Int8Portable;
struct BytesPortable {
  using Sums = Int8::Sums;
  struct Columns {
    Sums of[4];
  };
  struct Row {
    int32_t of[4];
  };
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
  static Row LoadRow(const uint8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static Sums Dot(Sums sums, const Row& row, const Columns& columns) {
    for (int i = 0; i < 4; ++i) sums += row.of[i] * columns.of[i];
    return sums;
  }
};
using ByteProducts = BytesPortable;
using KeyProducts = ByteProducts;
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_PRODUCTS_H_
