// SPDX-License-Identifier: Apache-2.0
// Scores of a tile row: as ranks of codes where a rounding is the last thing that happens to them, else in fp32.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_
#define STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_

#include <cstdint>

#include "cpu/quantized_attention/byte_rows.h"
#include "cpu/quantized_attention/tiles.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/math.h"

namespace stof {
namespace cpu {
namespace {

// The products of Int8::kRows rows and the keys of a tile, zero points included: [kRows, keys].
inline void MultiplyTile(const QuantizedProblem& p, const RowScratch& s, int64_t head, int64_t tile, int64_t row,
                         int32_t* products) {
  constexpr int kBlock = Int8::kVectors * Int8::kLanes;
  const int64_t at = head * p.key_tiles + tile, size = 4 * p.d_quads;
  const int8_t* const keys = p.keys + at * kTileKeys * size;
  const int32_t* const key_terms = p.key_sums + at * kTileKeys;
  for (int c = 0; c < kTileKeys; c += kBlock) {
    SumBlock<Int8::kVectors> sums;
#pragma GCC unroll 4
    for (int v = 0; v < Int8::kVectors; ++v) {
      const Int8::Sums terms = Int8::Load(key_terms + c + v * Int8::kLanes);
#pragma GCC unroll 6
      for (int r = 0; r < Int8::kRows; ++r) sums.of[r][v] = Int8::Add(terms, Int8::Set1(s.row_terms[row + r]));
    }
    AddProducts<Int8::kVectors>(s.queries + row * size, size, keys + 4 * c, kTileKeys * 4, p.d_quads, &sums);
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < Int8::kVectors; ++v) {
        Int8::Store(products + r * kTileKeys + c + v * Int8::kLanes, sums.of[r][v]);
      }
    }
  }
}

// ---- ranks ----
inline float Finite(double x) { return x > 3.4e38 ? 3.4e38f : static_cast<float>(x); }

// The rank of a number of steps.
inline uint8_t RankOf(double steps, const Quantization& q) {
  const double rank = __builtin_nearbyint(steps < -1e6 ? -1e6 : steps > 1e6 ? 1e6 : steps) + q.zero_rank();
  return static_cast<uint8_t>(rank < 0 ? 0 : rank > 255 ? 255 : rank);
}

inline void FillRankTables(const QuantizedProblem& p, RankTables* t) {
  const QuantizedAttentionArgs& args = *p.args;
  double unit = double{args.query.scale} * double{args.key.scale};  // of what has been rounded so far, or of products
  const Quantization* before = nullptr;
  bool is_scaled = false;
  t->has_one_rounding = true;
  for (int i = 0; i < 256; ++i) t->last[i] = static_cast<uint8_t>(i);
  for (const Quantization* next : {&args.score, &args.scaled_score, &args.biased_score}) {
    if (!is_scaled && next != &args.score) {
      unit *= double{args.attention.scores.scale};
      is_scaled = true;
    }
    if (!next->given()) continue;
    const double steps = unit / double{next->scale};
    if (before == nullptr) {
      t->factor = Finite(steps);
      t->zero_rank = next->zero_rank();
    } else {
      t->has_one_rounding = false;
      for (uint8_t& rank : t->last) rank = RankOf((rank - before->zero_rank()) * steps, *next);
    }
    before = next;
    unit = double{next->scale};
  }
  for (int i = 0; i < 256; ++i) {
    const double weight = __builtin_exp(-i * unit);
    t->weights[i] = static_cast<float>(weight);
    t->exponents[i] = static_cast<uint32_t>(weight * 2147483648.0 + 0.5);
    for (int byte = 0; byte < 4; ++byte) {
      t->exponent_bytes[byte][i] = static_cast<uint8_t>(t->exponents[i] >> (8 * byte));
    }
  }
  t->weights[256] = 0.0f;
  t->exponents[256] = 0;
}

inline void FindRanks(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited) {
  alignas(64) int32_t products[Int8::kRows * kTileKeys];
  const RankTables& t = *s.tables;
  const int64_t head = rows.b * p.args->attention.shape.G + rows.g, end = RoundUp(rows.count, Int8::kRows);
  Fill(s.byte_max, s.byte_max + p.m * kTileKeys, uint8_t{0});
  for (int64_t i = 0; i < visited; ++i) {
    for (int64_t row = 0; row < end; row += Int8::kRows) {
      const uint64_t* const allowed = s.allowed + i * p.m + row;
      if (!HasKeys(allowed)) continue;
      MultiplyTile(p, s, head, s.tiles[i], row, products);
      for (int r = 0; r < Int8::kRows; ++r) {
        RoundRow(products + r * kTileKeys, t, allowed[r], s.codes + (i * p.m + row + r) * kTileKeys,
                 s.byte_max + (row + r) * kTileKeys);
      }
    }
  }
}

// ---- fp32 ----
// x rounded to a code, as a number again.
struct Rounding {
  float inverse = 0.0f, scale = 0.0f, low = 0.0f, high = 0.0f;
  explicit Rounding(const Quantization& q)
      : inverse(Finite(1.0 / double{q.scale})),
        scale(q.scale),
        low(static_cast<float>(-q.zero_rank())),
        high(static_cast<float>(255 - q.zero_rank())) {}
  V Of(V x) const {
    const V steps = Simd::Min(Simd::Set1(high), Simd::Max(Simd::Set1(low), Simd::Mul(x, Simd::Set1(inverse))));
    return Simd::Mul(Simd::Round(steps), Simd::Set1(scale));
  }
};

// The bias of a row for the keys of a tile, zeros beyond T.
inline void LoadBias(const PairBias& bias, const TileRows& rows, int64_t row, int64_t first, int64_t count, float* to) {
  const float* const from = static_cast<const float*>(bias.data) + rows.b * bias.stride_b + rows.h * bias.stride_h +
                            (rows.first + row) * bias.stride_q + first * bias.stride_k;
  if (bias.stride_k == 1) {
    Copy(from, from + count, to);
  } else {
    for (int64_t k = 0; k < count; ++k) to[k] = from[k * bias.stride_k];
  }
  Fill(to + count, to + kTileKeys, 0.0f);
}

struct FloatScores {
  float unit, scale;
  bool has_score, has_scaled, has_biased;
  Rounding score, scaled, biased;

  explicit FloatScores(const QuantizedAttentionArgs& args)
      : unit(Finite(double{args.query.scale} * double{args.key.scale})),
        scale(args.attention.scores.scale),
        has_score(args.score.given()),
        has_scaled(args.scaled_score.given()),
        has_biased(args.biased_score.given()),
        score(args.score),
        scaled(args.scaled_score),
        biased(args.biased_score) {}

  // Scores of a row from its products; -inf of keys that are not allowed. bias: nullptr where there is none.
  void Of(const int32_t* products, const float* bias, uint64_t allowed, float* scores, float* most) const {
    V max = Simd::Load(most);
    for (int k = 0; k < kTileKeys; k += kWidth) {
      alignas(64) float converted[kWidth];
      for (int i = 0; i < kWidth; ++i) converted[i] = static_cast<float>(products[k + i]);
      V x = Simd::Mul(Simd::Load(converted), Simd::Set1(unit));
      if (has_score) x = score.Of(x);
      x = Simd::Mul(x, Simd::Set1(scale));
      if (has_scaled) x = scaled.Of(x);
      if (bias != nullptr) x = Simd::Add(x, Simd::Load(bias + k));
      if (has_biased) x = biased.Of(x);
      x = Simd::Where(static_cast<uint32_t>(allowed >> k), x, Simd::Set1(-__builtin_inff()));
      max = Simd::Max(x, max);
      Simd::Store(scores + k, x);
    }
    Simd::Store(most, max);
  }
};

inline void FindScores(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited) {
  alignas(64) int32_t products[Int8::kRows * kTileKeys];
  float bias[kTileKeys];
  const QuantizedAttentionArgs& args = *p.args;
  const PairBias& pair_bias = args.attention.scores.bias;
  const FloatScores scores(args);
  const int64_t head = rows.b * args.attention.shape.G + rows.g, end = RoundUp(rows.count, Int8::kRows);
  Fill(s.float_max, s.float_max + p.m * kWidth, -__builtin_inff());
  for (int64_t i = 0; i < visited; ++i) {
    const int64_t first = int64_t{s.tiles[i]} * kTileKeys, count = Min(kTileKeys, args.attention.shape.T - first);
    for (int64_t row = 0; row < end; row += Int8::kRows) {
      const uint64_t* const allowed = s.allowed + i * p.m + row;
      if (!HasKeys(allowed)) continue;
      MultiplyTile(p, s, head, s.tiles[i], row, products);
      for (int64_t r = 0; r < Min(Int8::kRows, rows.count - row); ++r) {
        if (allowed[r] == 0) continue;
        const bool has_bias = pair_bias.data != nullptr;
        if (has_bias) LoadBias(pair_bias, rows, row + r, first, count, bias);
        scores.Of(products + r * kTileKeys, has_bias ? bias : nullptr, allowed[r],
                  s.scores + (i * p.m + row + r) * kTileKeys, s.float_max + (row + r) * kWidth);
      }
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_
