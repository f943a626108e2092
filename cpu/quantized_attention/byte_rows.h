// SPDX-License-Identifier: Apache-2.0
// What happens to the 64 bytes of a row and a tile: rounding to unsigned codes, sums of exponentials, codes of weights.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_BYTE_ROWS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_BYTE_ROWS_H_

#include <cstdint>

#include "cpu/quantized_attention/scratch.h"

namespace stof {
namespace cpu {
namespace {

// 1.5 * 2^23: adding it rounds a number below 2^22 to an integer, ties to even.
constexpr float kRoundToInteger = 12582912.0f;

#if defined(__AVX512VBMI__)
// A table of 256 bytes in registers.
struct ByteTable {
  __m512i of[4];
  explicit ByteTable(const uint8_t* table) {
    for (int i = 0; i < 4; ++i) of[i] = _mm512_loadu_si512(table + 64 * i);
  }
  // high: the lanes of indices of 128 and more.
  __m512i Look(__m512i index, __mmask64 high) const {
    const __m512i low = _mm512_permutex2var_epi8(of[0], index, of[1]);
    return _mm512_mask_blend_epi8(high, low, _mm512_permutex2var_epi8(of[2], index, of[3]));
  }
  __m512i Look(__m512i index) const { return Look(index, _mm512_movepi8_mask(index)); }
};
#endif

#if defined(__AVX512BW__)
// Codes of 64 rounded numbers of steps.
inline __m512i PackCodes(const __m512i (&steps)[4], int32_t zero_code) {
  const __m512i zero = _mm512_set1_epi16(static_cast<int16_t>(zero_code));
  const __m512i words01 = _mm512_adds_epi16(_mm512_packs_epi32(steps[0], steps[1]), zero);
  const __m512i words23 = _mm512_adds_epi16(_mm512_packs_epi32(steps[2], steps[3]), zero);
  // Packs work by lanes of 128 bits: doubleword 4 L + i of the result has four codes of steps[i], lane L.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_packus_epi16(words01, words23));
}

// The codes of 64 products.
inline __m512i RoundProducts(const int32_t* products, const ScoreCodeTables& t) {
  const __m512 factor = _mm512_set1_ps(t.factor), most = _mm512_set1_ps(1e6f);
  __m512i steps[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_loadu_si512(products + 16 * i)), factor);
    steps[i] = _mm512_cvtps_epi32(_mm512_min_ps(x, most));  // far below 0 it is the least integer, as it should be
  }
  return PackCodes(steps, t.zero_code);
}

inline void RoundRow(const int32_t* products, const ScoreCodeTables& t, uint64_t allowed, uint8_t* codes,
                     uint8_t* most) {
  __m512i rounded = RoundProducts(products, t);
#if defined(__AVX512VBMI__)
  if (!t.has_one_rounding) rounded = ByteTable(t.last).Look(rounded);
  _mm512_storeu_si512(codes, rounded);
#else
  _mm512_storeu_si512(codes, rounded);
  if (!t.has_one_rounding) {
    for (int k = 0; k < kTileKeys; ++k) codes[k] = t.last[codes[k]];
    rounded = _mm512_loadu_si512(codes);
  }
#endif
  const __m512i max = _mm512_loadu_si512(most);
  _mm512_storeu_si512(most, _mm512_mask_max_epu8(max, allowed, max, rounded));
}
#elif defined(__AVX2__)
// Byte i: all bits where bit i is set.
inline __m256i BytesOfBits(uint32_t bits) {
  const __m256i bytes =
      _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)),
                          _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201u));
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}
// The codes of 32 products.
inline __m256i RoundProducts(const int32_t* products, const ScoreCodeTables& t) {
  const __m256 factor = _mm256_set1_ps(t.factor), most = _mm256_set1_ps(1e6f);
  __m256i steps[4];
  for (int i = 0; i < 4; ++i) {
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(products + 8 * i));
    const __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(loaded), factor);
    steps[i] = _mm256_cvtps_epi32(_mm256_min_ps(x, most));  // far below 0 it is the least integer, as it should be
  }
  const __m256i zero = _mm256_set1_epi16(static_cast<int16_t>(t.zero_code));
  const __m256i words01 = _mm256_adds_epi16(_mm256_packs_epi32(steps[0], steps[1]), zero);
  const __m256i words23 = _mm256_adds_epi16(_mm256_packs_epi32(steps[2], steps[3]), zero);
  // Packs work by lanes of 128 bits: doubleword 4 L + i of the result has four codes of steps[i], lane L.
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words01, words23), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

inline void RoundRow(const int32_t* products, const ScoreCodeTables& t, uint64_t allowed, uint8_t* codes,
                     uint8_t* most) {
  for (int k = 0; k < kTileKeys; k += 32) {
    auto* const to = reinterpret_cast<__m256i*>(codes + k);
    __m256i rounded = RoundProducts(products + k, t);
    if (!t.has_one_rounding) {
      _mm256_storeu_si256(to, rounded);
      for (int i = k; i < k + 32; ++i) codes[i] = t.last[codes[i]];
      rounded = _mm256_loadu_si256(to);
    }
    // Forbidden keys have code 0, as SumExponents takes them.
    const __m256i kept = _mm256_and_si256(rounded, BytesOfBits(static_cast<uint32_t>(allowed >> k)));
    _mm256_storeu_si256(to, kept);
    auto* const max = reinterpret_cast<__m256i*>(most + k);
    _mm256_storeu_si256(max, _mm256_max_epu8(_mm256_loadu_si256(max), kept));
  }
}
#else
inline void RoundRow(const int32_t* products, const ScoreCodeTables& t, uint64_t allowed, uint8_t* codes,
                     uint8_t* most) {
  const float low = static_cast<float>(-t.zero_code), high = static_cast<float>(255 - t.zero_code);
  for (int k = 0; k < kTileKeys; ++k) {
    float steps = static_cast<float>(products[k]) * t.factor;
    steps = steps < low ? low : steps;
    steps = steps > high ? high : steps;
    const float rounded = (steps + kRoundToInteger) - kRoundToInteger;
    codes[k] = static_cast<uint8_t>(static_cast<int32_t>(rounded) + t.zero_code);
  }
  if (!t.has_one_rounding) {
    for (int k = 0; k < kTileKeys; ++k) codes[k] = t.last[codes[k]];
  }
  for (int k = 0; k < kTileKeys; ++k) {
    const uint8_t code = (allowed >> k & 1) != 0 ? codes[k] : 0;
    most[k] = code > most[k] ? code : most[k];
  }
}
#endif

// The codes of weights by the difference of a score's code to the row's largest: table [256] of weights times `factor`,
// rounded. zero: the code of 0. Returns how many entries are written: all others have the code of 0. Lookups in 16
// entries at a time end there, while those of other sets take all of them.
inline int RoundWeightTable(const float* weights, float factor, int32_t zero, uint8_t* table) {
  const float high = static_cast<float>(255 - zero);
#if defined(__AVX512VBMI__)
  // Whole vectors are stored: they are read again at once, which narrower stores would delay.
  const __m512 factors = _mm512_set1_ps(factor), most = _mm512_set1_ps(high);
  for (int i = 0; i < 256; i += 64) {
    __m512i steps[4];
    for (int v = 0; v < 4; ++v) {
      const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(weights + i + 16 * v), factors);
      steps[v] = _mm512_cvtps_epi32(_mm512_min_ps(x, most));
    }
    _mm512_storeu_si512(table + i, PackCodes(steps, zero));
  }
  return 256;
#elif defined(__AVX2__)
  const __m256 factors = _mm256_set1_ps(factor), most = _mm256_set1_ps(high);
  const __m128i zeros = _mm_set1_epi16(static_cast<int16_t>(zero));
  int used = 0;
  // Weights fall, and half a step is rounded to 0.
  for (; used < 256 && weights[used] * factor > 0.5f; used += 16) {
    __m128i words[2];
    for (int v = 0; v < 2; ++v) {
      const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(weights + used + 8 * v), factors);
      const __m256i steps = _mm256_cvtps_epi32(_mm256_min_ps(x, most));
      words[v] =
          _mm_add_epi16(_mm_packs_epi32(_mm256_castsi256_si128(steps), _mm256_extracti128_si256(steps, 1)), zeros);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(table + used), _mm_packus_epi16(words[0], words[1]));
  }
  return used;
#else
  // The bits of a number below 2^22 that is added to 1.5 * 2^23 end with its nearest integer.
  for (int i = 0; i < 256; ++i) {
    const float steps = weights[i] * factor;
    const float moved = (steps > high ? high : steps) + kRoundToInteger;
    uint32_t bits;
    std::memcpy(&bits, &moved, sizeof(bits));
    table[i] = static_cast<uint8_t>(bits + static_cast<uint32_t>(zero));
  }
  return 256;
#endif
}

// How many tiles a row visits, and where they lie: `codes` and `allowed` of the first one.
struct RowTiles {
  uint8_t* codes;
  const uint64_t* allowed;
  int64_t visited, m;
  uint8_t* Codes(int64_t i) const { return codes + i * m * kTileKeys; }
  uint64_t Allowed(int64_t i) const { return allowed[i * m]; }
};

#if defined(__AVX512BW__) && !defined(__AVX512VBMI__)
// A table of 256 words in registers.
struct WordTable {
  __m512i of[8];
  explicit WordTable(const uint16_t* table) {
    for (int i = 0; i < 8; ++i) of[i] = _mm512_loadu_si512(table + 32 * i);
  }
  __m512i Look(__m512i index) const {
    const __mmask32 odd = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
    const __mmask32 high = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
    __m512i found[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) found[i] = _mm512_permutex2var_epi16(of[2 * i], index, of[2 * i + 1]);
    return _mm512_mask_blend_epi16(high, _mm512_mask_blend_epi16(odd, found[0], found[1]),
                                   _mm512_mask_blend_epi16(odd, found[2], found[3]));
  }
};

inline uint64_t AddWords(__m512i sums) {
  uint32_t lanes[16];
  _mm512_storeu_si512(lanes, sums);
  uint64_t total = 0;
  for (const uint32_t lane : lanes) total += lane;
  return total;
}
#endif

// The sum of the exponentials of a row, times 2^31. most: its largest code.
inline uint64_t SumExponents(const RowTiles& row, const ScoreCodeTables& t, uint8_t most) {
  uint64_t total = 0;
#if defined(__AVX512VBMI__)
  const ByteTable tables[4] = {ByteTable(t.exponent_bytes[0]), ByteTable(t.exponent_bytes[1]),
                               ByteTable(t.exponent_bytes[2]), ByteTable(t.exponent_bytes[3])};
  const __m512i none = _mm512_setzero_si512(), max = _mm512_set1_epi8(static_cast<char>(most));
  __m512i sums[4] = {none, none, none, none};
  for (int64_t i = 0; i < row.visited; ++i) {
    const uint64_t allowed = row.Allowed(i);
    if (allowed == 0) continue;
    const __m512i below = _mm512_sub_epi8(max, _mm512_loadu_si512(row.Codes(i)));
    const __mmask64 high = _mm512_movepi8_mask(below);
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte) {
      const __m512i found = _mm512_maskz_mov_epi8(allowed, tables[byte].Look(below, high));
      sums[byte] = _mm512_add_epi64(sums[byte], _mm512_sad_epu8(found, none));
    }
  }
  for (int byte = 0; byte < 4; ++byte) {
    total += static_cast<uint64_t>(_mm512_reduce_add_epi64(sums[byte])) << (8 * byte);
  }
#elif defined(__AVX512BW__)
  constexpr int64_t kFlushed = 8192;  // tiles whose sums of words fit 32 bits
  const WordTable tables[2] = {WordTable(t.exponent_words[0]), WordTable(t.exponent_words[1])};
  const __m512i max = _mm512_set1_epi16(most);
  for (int64_t begin = 0; begin < row.visited; begin += kFlushed) {
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int64_t i = begin; i < Min(row.visited, begin + kFlushed); ++i) {
      const uint64_t allowed = row.Allowed(i);
      for (int k = 0; k < kTileKeys && allowed != 0; k += 32) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row.Codes(i) + k));
        const __m512i below = _mm512_sub_epi16(max, _mm512_cvtepu8_epi16(codes));
#pragma GCC unroll 2
        for (int word = 0; word < 2; ++word) {
          const __m512i found = _mm512_maskz_mov_epi16(static_cast<__mmask32>(allowed >> k), tables[word].Look(below));
          const __m512i pairs =
              _mm512_add_epi32(_mm512_and_si512(found, _mm512_set1_epi32(0xffff)), _mm512_srli_epi32(found, 16));
          sums[word] = _mm512_add_epi32(sums[word], pairs);
        }
      }
    }
    for (int word = 0; word < 2; ++word) total += AddWords(sums[word]) << (16 * word);
  }
#elif defined(__AVX2__)
  // Forbidden keys of a tile have code 0 (RoundRow): their exponentials are subtracted.
  const uint64_t* const of_code = t.rising_exponents + 255 - most;
  uint64_t forbidden = 0;
  for (int64_t i = 0; i < row.visited; ++i) {
    const uint64_t allowed = row.Allowed(i);
    if (allowed == 0) continue;
    const uint8_t* const codes = row.Codes(i);
    uint64_t sums[2] = {0, 0};
    for (int k = 0; k < kTileKeys; k += 8) {
      uint64_t eight;
      std::memcpy(&eight, codes + k, 8);
#pragma GCC unroll 8
      for (int byte = 0; byte < 8; ++byte) sums[byte % 2] += of_code[eight >> (8 * byte) & 255u];
    }
    total += sums[0] + sums[1];
    forbidden += static_cast<uint64_t>(kTileKeys - __builtin_popcountll(allowed));
  }
  total -= forbidden * of_code[0];
#else
  for (int64_t i = 0; i < row.visited; ++i) {
    const uint64_t allowed = row.Allowed(i);
    const uint8_t* const codes = row.Codes(i);
    // Two sums: an addition need not wait for the one before.
    uint64_t sums[2] = {0, 0};
    if (allowed == ~uint64_t{0}) {
      for (int k = 0; k < kTileKeys; ++k) sums[k % 2] += t.exponents[most - codes[k]];
    } else if (allowed != 0) {
      for (int k = 0; k < kTileKeys; ++k) sums[k % 2] += t.exponents[(allowed >> k & 1) != 0 ? most - codes[k] : 256];
    }
    total += sums[0] + sums[1];
  }
#endif
  return total;
}

// Replaces the codes of a row's scores by those of its weights, by table [257] of the difference to the largest code;
// entry 256, and what stands for forbidden keys, is the code of 0. used: the entries that are given. Returns the sum of
// codes, counted from it.
inline int64_t LookWeights(const RowTiles& row, const uint8_t* table, [[maybe_unused]] int used, uint8_t most) {
  const uint8_t zero = table[256];
  int64_t total = 0;
#if defined(__AVX512BW__)
  const __m512i max = _mm512_set1_epi8(static_cast<char>(most)), none = _mm512_set1_epi8(static_cast<char>(zero));
  __m512i sums = _mm512_setzero_si512();
#if defined(__AVX512VBMI__)
  const ByteTable weights(table);
#endif
  for (int64_t i = 0; i < row.visited; ++i) {
    const __m512i below = _mm512_sub_epi8(max, _mm512_loadu_si512(row.Codes(i)));
#if defined(__AVX512VBMI__)
    const __m512i found = weights.Look(below);
#else
    // 16 entries at a time. An index beyond them gets its high bit set, by which the shuffle gives 0.
    __m512i found = none;
    for (int entry = 0; entry < used; entry += 16) {
      const __m512i index = _mm512_sub_epi8(below, _mm512_set1_epi8(static_cast<char>(entry)));
      const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + entry)));
      const __m512i moved = _mm512_sub_epi8(entries, none);
      found = _mm512_add_epi8(found, _mm512_shuffle_epi8(moved, _mm512_adds_epu8(index, _mm512_set1_epi8(0x70))));
    }
#endif
    const __m512i kept = _mm512_mask_mov_epi8(none, row.Allowed(i), found);
    _mm512_storeu_si512(row.Codes(i), kept);
    sums = _mm512_add_epi64(sums, _mm512_sad_epu8(kept, _mm512_setzero_si512()));
  }
  total = _mm512_reduce_add_epi64(sums);
#elif defined(__AVX2__)
  const __m256i max = _mm256_set1_epi8(static_cast<char>(most)), none = _mm256_set1_epi8(static_cast<char>(zero));
  __m256i sums = _mm256_setzero_si256();
  for (int64_t i = 0; i < row.visited; ++i) {
    const uint64_t allowed = row.Allowed(i);
    if (allowed == 0) {
      Fill(row.Codes(i), row.Codes(i) + kTileKeys, zero);
      total += int64_t{kTileKeys} * zero;
      continue;
    }
    for (int k = 0; k < kTileKeys; k += 32) {
      auto* const codes = reinterpret_cast<__m256i*>(row.Codes(i) + k);
      const __m256i below = _mm256_sub_epi8(max, _mm256_loadu_si256(codes));
      __m256i found = none;
      for (int entry = 0; entry < used; entry += 16) {
        const __m256i index = _mm256_sub_epi8(below, _mm256_set1_epi8(static_cast<char>(entry)));
        const __m256i entries =
            _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table + entry)));
        const __m256i moved = _mm256_sub_epi8(entries, none);
        found = _mm256_add_epi8(found, _mm256_shuffle_epi8(moved, _mm256_adds_epu8(index, _mm256_set1_epi8(0x70))));
      }
      const __m256i kept = _mm256_blendv_epi8(none, found, BytesOfBits(static_cast<uint32_t>(allowed >> k)));
      _mm256_storeu_si256(codes, kept);
      sums = _mm256_add_epi64(sums, _mm256_sad_epu8(kept, _mm256_setzero_si256()));
    }
  }
  int64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  total += lanes[0] + lanes[1] + lanes[2] + lanes[3];
#else
  for (int64_t i = 0; i < row.visited; ++i) {
    uint8_t* const codes = row.Codes(i);
    const uint64_t allowed = row.Allowed(i);
    int32_t sum = 0;
    for (int k = 0; k < kTileKeys; ++k) {
      codes[k] = table[(allowed >> k & 1) != 0 ? most - codes[k] : 256];
      sum += codes[k];
    }
    total += sum;
  }
#endif
  return total - row.visited * kTileKeys * zero;
}

// Whether a weight of Int8::kRows rows has another code than 0 has: [kRows, keys].
inline bool HasWeights(const uint8_t* codes, uint8_t zero) {
  constexpr int kBytes = Int8::kRows * kTileKeys;
#if defined(__AVX512BW__)
  __mmask64 any = 0;
  const __m512i none = _mm512_set1_epi8(static_cast<char>(zero));
  for (int i = 0; i < kBytes; i += 64) any |= _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(codes + i), none);
  return any != 0;
#else
  const uint64_t zeros = 0x0101010101010101u * zero;
  uint64_t any = 0;
  for (int i = 0; i < kBytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, codes + i, 8);
    any |= word ^ zeros;
  }
  return any != 0;
#endif
}

#if defined(STOF_HAS_SHORT_PRODUCTS)
// The largest sum of codes of weights that a 16-bit lane takes: 128 times as much is below 2^15.
constexpr int32_t kMostLaneSum = 255;

// The largest sum of codes of weights, [kRows, keys], that one 16-bit lane gets.
inline int32_t LargestLaneSum(const uint8_t* codes) {
  // Of a word a lane takes the first two codes, and its neighbour the others.
  const __m256i none = _mm256_setzero_si256(), firsts = _mm256_set1_epi32(0xffff);
  __m128i most = _mm_setzero_si128();
  for (int r = 0; r < Int8::kRows; ++r) {
    __m256i first = none, second = none;
    for (int k = 0; k < kTileKeys; k += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + r * kTileKeys + k));
      first = _mm256_add_epi64(first, _mm256_sad_epu8(_mm256_and_si256(x, firsts), none));
      second = _mm256_add_epi64(second, _mm256_sad_epu8(_mm256_andnot_si256(firsts, x), none));
    }
    const __m256i both = _mm256_or_si256(first, _mm256_slli_epi64(second, 32));
    const __m128i two = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    most = _mm_max_epi32(most, _mm_add_epi32(two, _mm_unpackhi_epi64(two, two)));
  }
  const int32_t first = _mm_extract_epi32(most, 0), second = _mm_extract_epi32(most, 1);
  return first > second ? first : second;
}
#else
inline int32_t LargestLaneSum(const uint8_t* /*codes*/) { return 0; }
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_BYTE_ROWS_H_
