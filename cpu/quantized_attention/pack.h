// SPDX-License-Identifier: Apache-2.0
// Copies of queries, keys and values in the order that products read, and the sums that stand for zero points.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_PACK_H_
#define STOF_CPU_QUANTIZED_ATTENTION_PACK_H_

#include <cstdint>
#include <cstring>

#include "cpu/quantized_attention/products.h"
#include "cpu/quantized_attention/quantized_attention.h"

namespace stof {
namespace cpu {
namespace {

constexpr int kTileKeys = kQuantizedTileKeys;

// The zero point of codes that are moved into int8.
inline int32_t SignedZero(const Quantization& q) { return q.zero_point - (q.is_signed ? 0 : 128); }
// What moves the code of a byte into int8, and into uint8.
inline uint8_t ToSigned(const Quantization& q) { return q.is_signed ? 0 : 0x80; }
inline uint8_t ToUnsigned(const Quantization& q) { return q.is_signed ? 0x80 : 0; }

inline const uint8_t* RowOf(const TensorView& view, int64_t b, int64_t head, int64_t row) {
  return static_cast<const uint8_t*>(view.data) + b * view.stride.b + head * view.stride.h + row * view.stride.s;
}

// Values of a row of queries or keys, moved by `flip`, in the element that products read: `Code` as it is, or extended
// to 16 bits. Returns their sum.
template <typename Code>
inline int32_t PackRow(const uint8_t* row, int64_t D, uint8_t flip, uint8_t* packed) {
  int32_t sum = 0;
  for (int64_t d = 0; d < D; ++d) sum += static_cast<Code>(row[d] ^ flip);
  if constexpr (Int8::kKeyBytes == 1) {
    for (int64_t d = 0; d < D; ++d) packed[d] = row[d] ^ flip;
  } else {
    auto* const words = reinterpret_cast<int16_t*>(packed);
    for (int64_t d = 0; d < D; ++d) words[d] = static_cast<Code>(row[d] ^ flip);
  }
  return sum;
}

// Keys of a tile: [words][keys][4]; what does not exist is 0. sums: what a key adds to each of its products, for the
// zero point of the query.
inline void PackKeyTile(const QuantizedProblem& p, int64_t b, int64_t g, int64_t tile, int8_t* packed, int32_t* sums) {
  const QuantizedAttentionArgs& args = *p.args;
  const AttentionShape& shape = args.attention.shape;
  const int64_t first = tile * kTileKeys, count = Min(kTileKeys, shape.T - first);
  const uint8_t flip = ToSigned(args.key);
  const auto query_zero = args.query.zero_code();
  alignas(64) uint8_t whole[kMostQuantizedHeadSize * Int8::kKeyBytes] = {};  // a key
  if (count < kTileKeys) std::memset(packed, 0, static_cast<size_t>(p.key_words * kTileKeys * 4));
  for (int64_t k = 0; k < kTileKeys; ++k) {
    int32_t sum = 0;
    if (k < count) {
      const uint8_t* const row = RowOf(args.attention.key, b, g, first + k);
      sum = PackRow<int8_t>(row, shape.D, flip, whole);
      for (int64_t w = 0; w < p.key_words; ++w) std::memcpy(packed + (w * kTileKeys + k) * 4, whole + 4 * w, 4);
    }
    sums[k] = (Int8::kRowOffset - query_zero) * sum;
  }
}

// Values of a tile: [quads of keys][columns][4]; what does not exist is 0. sums: of each column.
inline void PackValueTile(const QuantizedProblem& p, int64_t b, int64_t g, int64_t tile, int8_t* packed,
                          int32_t* sums) {
  const QuantizedAttentionArgs& args = *p.args;
  const AttentionShape& shape = args.attention.shape;
  const int64_t first = tile * kTileKeys, count = Min(kTileKeys, shape.T - first), columns = p.dv_padded;
  const uint8_t flip = ToSigned(args.value);
  Fill(sums, sums + columns, 0);
  if (count < kTileKeys || columns != shape.Dv) {
    std::memset(packed, 0, static_cast<size_t>(columns * kTileKeys));
  }
  for (int64_t k = 0; k < count; k += 4) {
    int8_t* const to = packed + k * columns;
    if (k + 4 > count) {
      for (int64_t i = k; i < count; ++i) {
        const uint8_t* const row = RowOf(args.attention.value, b, g, first + i);
        for (int64_t d = 0; d < shape.Dv; ++d) {
          to[4 * d + i - k] = static_cast<int8_t>(row[d] ^ flip);
          sums[d] += static_cast<int8_t>(row[d] ^ flip);
        }
      }
      break;
    }
    const uint8_t* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = RowOf(args.attention.value, b, g, first + k + i);
    int64_t d = 0;
#if defined(__AVX2__)
    const __m128i flips = _mm_set1_epi8(static_cast<char>(flip));
    for (; d + 16 <= shape.Dv; d += 16) {
      __m128i of[4];
      for (int i = 0; i < 4; ++i) {
        of[i] = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i] + d)), flips);
      }
      const __m128i low01 = _mm_unpacklo_epi8(of[0], of[1]), high01 = _mm_unpackhi_epi8(of[0], of[1]);
      const __m128i low23 = _mm_unpacklo_epi8(of[2], of[3]), high23 = _mm_unpackhi_epi8(of[2], of[3]);
      const __m128i quads[4] = {_mm_unpacklo_epi16(low01, low23), _mm_unpackhi_epi16(low01, low23),
                                _mm_unpacklo_epi16(high01, high23), _mm_unpackhi_epi16(high01, high23)};
      const __m128i ones = _mm_set1_epi8(1), words = _mm_set1_epi16(1);
      for (int i = 0; i < 4; ++i) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * d + 16 * i), quads[i]);
        auto* const sum = reinterpret_cast<__m128i*>(sums + d + 4 * i);
        const __m128i added = _mm_madd_epi16(_mm_maddubs_epi16(ones, quads[i]), words);
        _mm_storeu_si128(sum, _mm_add_epi32(_mm_loadu_si128(sum), added));
      }
    }
#endif
    for (; d < shape.Dv; ++d) {
      for (int i = 0; i < 4; ++i) {
        const auto value = static_cast<int8_t>(rows[i][d] ^ flip);
        to[4 * d + i] = value;
        sums[d] += value;
      }
    }
  }
}

inline void PackHead(const QuantizedProblem& p, int64_t head) {
  const int64_t G = p.args->attention.shape.G, b = head / G, g = head % G;
  for (int64_t tile = 0; tile < p.key_tiles; ++tile) {
    const int64_t at = head * p.key_tiles + tile;
    PackKeyTile(p, b, g, tile, p.keys + at * kTileKeys * p.key_words * 4, p.key_sums + at * kTileKeys);
    PackValueTile(p, b, g, tile, p.values + at * kTileKeys * p.dv_padded, p.value_sums + at * p.dv_padded);
  }
}

// Rows of queries as uint8, [count, words, 4], and what a row adds to each of its products: those of the key's zero
// point.
inline void PackQueries(const QuantizedProblem& p, int64_t b, int64_t h, int64_t first, int64_t count, int64_t padded,
                        uint8_t* packed, int32_t* row_terms) {
  const QuantizedAttentionArgs& args = *p.args;
  const int64_t D = args.attention.shape.D, size = 4 * p.key_words;
  const uint8_t flip = ToUnsigned(args.query);
  const int32_t key_zero = SignedZero(args.key), query_zero = args.query.zero_code();
  std::memset(packed, 0, static_cast<size_t>(padded * size));
  for (int64_t i = 0; i < padded; ++i) {
    row_terms[i] = 0;
    if (i >= count) continue;
    const uint8_t* const row = RowOf(args.attention.query, b, h, first + i);
    const int32_t sum = PackRow<uint8_t>(row, D, flip, packed + i * size);
    row_terms[i] = key_zero * (static_cast<int32_t>(D) * query_zero - sum);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_PACK_H_
