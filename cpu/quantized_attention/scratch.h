// SPDX-License-Identifier: Apache-2.0
// A worker's memory: tables of a call, and what it keeps of the rows that it attends.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_SCRATCH_H_
#define STOF_CPU_QUANTIZED_ATTENTION_SCRATCH_H_

#include <cstdint>
#include <type_traits>

#include "cpu/quantized_attention/pack.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

// Scores that are kept as unsigned codes (code minus the lowest code): all that follows from their difference to the
// row's largest one. Entry 256 is that of a forbidden key.
struct ScoreCodeTables {
  uint8_t last[256];               // the code after the last rounding, by that after the first
  bool has_one_rounding;           // `last` changes nothing
  float factor;                    // of sums of products: they become numbers of steps of the first rounding
  int32_t zero_code;               // of the first rounding
  float weights[257];              // exp of the difference
  uint32_t exponents[257];         // the same, times 2^31
  uint64_t rising_exponents[511];  // entry 255 - d is that of difference d, and 0 where a code is above the largest
  // Byte i, and word i, of all of them: for lookups in registers.
  alignas(64) uint8_t exponent_bytes[4][256];
  alignas(64) uint16_t exponent_words[2][256];
};

// What a strip of Int8::kRows rows of weights multiplies of a tile.
struct StripTile {
  int32_t lane_sum = 0;          // LargestLaneSum: of codes of weights in one 16-bit lane
  int16_t first = 0, words = 0;  // words of four keys that have weights; 0: none has
};

// The rows of a tile row, and the tiles that they visit. Tiles of visited ones lie one behind the other: [m rows,
// keys]. m stands for padded_m: rows of whole register blocks.
struct RowScratch {
  int64_t padded_m;
  ScoreCodeTables* tables;
  uint8_t* queries;      // [m, words, 4]
  int32_t* row_terms;    // [m]
  int32_t* tiles;        // visited key tiles, in the order in which they lie
  uint64_t* allowed;     // [visited, m]: bits of allowed keys
  uint8_t* codes;        // [visited, m, keys]: unsigned codes of scores, then of weights
  float* scores;         // likewise, where scores are not codes: scores, then their exponentials
  uint8_t* byte_max;     // [m, keys]: largest codes by lane
  float* float_max;      // [m, kWidth]
  int64_t* weight_sums;  // [m]: of codes of weights, counted from that of 0
  uint32_t* bits;        // [m, keys / 32]: of a tile
  StripTile* strip;      // [visited]: of a strip
  float* sums;           // [kRows, 64]: outputs of a strip
};

struct ScratchLayout {
  int64_t total = 0;
  template <typename T>
  int64_t Take(int64_t count) {
    const int64_t at = total;
    total += RoundUp(count * static_cast<int64_t>(sizeof(T)), 64);
    return at;
  }
};

// Lays a scratch out at `base`, which may be nullptr: then only the size counts.
inline int64_t MakeScratch(const QuantizedProblem& p, char* base, RowScratch* s) {
  ScratchLayout layout;
  const int64_t m = RoundUp(p.m, Int8::kRows), tiles = p.key_tiles, keys = kTileKeys;
  const auto place = [&](auto** to, int64_t count) {
    using T = std::remove_pointer_t<std::remove_reference_t<decltype(*to)>>;
    const int64_t at = layout.Take<T>(count);
    *to = base == nullptr ? nullptr : reinterpret_cast<T*>(base + at);
  };
  s->padded_m = m;
  place(&s->tables, 1);
  place(&s->queries, m * p.key_words * 4);
  place(&s->row_terms, m);
  place(&s->tiles, tiles);
  place(&s->allowed, tiles * m);
  place(&s->codes, tiles * m * keys);
  place(&s->scores, p.keeps_codes ? 0 : tiles * m * keys);
  place(&s->byte_max, m * keys);
  place(&s->float_max, m * kWidth);
  place(&s->weight_sums, m);
  place(&s->bits, m * keys / 32);
  place(&s->strip, tiles);
  place(&s->sums, int64_t{Int8::kRows} * 64);
  return layout.total;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_SCRATCH_H_
