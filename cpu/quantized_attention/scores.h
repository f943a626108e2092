// SPDX-License-Identifier: Apache-2.0
// Scores of a tile row: as unsigned codes where a rounding is the last thing that happens to them, else in fp32.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_
#define STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_

#include <cstdint>

#include "cpu/quantized_attention/byte_rows.h"
#include "cpu/quantized_attention/matmuls.h"
#include "cpu/quantized_attention/tiles.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/math.h"

namespace stof {
namespace cpu {
namespace {

// ---- unsigned codes ----
inline float Finite(double x) { return x > 3.4e38 ? 3.4e38f : static_cast<float>(x); }

// The unsigned code of a number of steps.
inline uint8_t UnsignedCode(float steps, const Quantization& q) {
  const float low = static_cast<float>(-q.zero_code()), high = static_cast<float>(255 - q.zero_code());
  const float rounded = ((steps < low ? low : steps > high ? high : steps) + kRoundToInteger) - kRoundToInteger;
  return static_cast<uint8_t>(static_cast<int32_t>(rounded) + q.zero_code());
}

// The operations in fp32 are those of the graph, in its order: a value at a tie is rounded as there. The factor of the
// first rounding is that of QLinearMatMul.
inline void FillScoreCodeTables(const QuantizedProblem& p, ScoreCodeTables* t) {
  const QuantizedAttentionArgs& args = *p.args;
  const float scale = args.attention.scores.scale;
  const Quantization* before = nullptr;
  bool is_scaled = false;
  float unit = args.query.scale * args.key.scale;  // of products, or of codes after a rounding
  t->has_one_rounding = true;
  for (int i = 0; i < 256; ++i) t->last[i] = static_cast<uint8_t>(i);
  const Quantization* const roundings[] = {&args.score, &args.scaled_score, &args.biased_score};
  for (const Quantization* next : roundings) {
    if (!next->given()) continue;
    const bool scales = next != &args.score && !is_scaled;
    if (before == nullptr) {
      t->factor = Finite(double{(scales ? unit * scale : unit) / next->scale});
      t->zero_code = next->zero_code();
    } else {
      t->has_one_rounding = false;
      for (uint8_t& code : t->last) {
        float number = static_cast<float>(code - before->zero_code()) * before->scale;
        if (scales) number *= scale;
        code = UnsignedCode(number / next->scale, *next);
      }
    }
    is_scaled = is_scaled || scales;
    before = next;
  }
  const double step = double{before->scale} * (is_scaled ? 1.0 : double{scale});
  for (int i = 0; i < 256; ++i) {
    const double weight = __builtin_exp(-i * step);
    t->weights[i] = static_cast<float>(weight);
    t->exponents[i] = static_cast<uint32_t>(weight * 2147483648.0 + 0.5);
    t->rising_exponents[255 - i] = t->exponents[i];
    for (int byte = 0; byte < 4; ++byte) {
      t->exponent_bytes[byte][i] = static_cast<uint8_t>(t->exponents[i] >> (8 * byte));
    }
    for (int word = 0; word < 2; ++word) {
      t->exponent_words[word][i] = static_cast<uint16_t>(t->exponents[i] >> (16 * word));
    }
  }
  t->weights[256] = 0.0f;
  t->exponents[256] = 0;
  for (int i = 256; i < 511; ++i) t->rising_exponents[i] = 0;
}

inline void FindScoreCodes(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited) {
  alignas(64) int32_t products[Int8::kRows * kTileKeys] = {};
  const ScoreCodeTables& t = *s.tables;
  const int64_t head = rows.b * p.args->attention.shape.G + rows.g, end = RoundUp(rows.count, Int8::kRows);
  Fill(s.byte_max, s.byte_max + s.padded_m * kTileKeys, uint8_t{0});
  for (int64_t i = 0; i < visited; ++i) {
    for (int64_t row = 0; row < end; row += Int8::kRows) {
      const uint64_t* const allowed = s.allowed + i * s.padded_m + row;
      const uint64_t wanted = KeysOfStrip(allowed);
      if (wanted == 0) continue;
      MultiplyTile(p, s, head, s.tiles[i], row, wanted, products);
      for (int r = 0; r < Int8::kRows; ++r) {
        RoundRow(products + r * kTileKeys, t, allowed[r], s.codes + (i * s.padded_m + row + r) * kTileKeys,
                 s.byte_max + (row + r) * kTileKeys);
      }
    }
  }
}

// ---- fp32 ----
// x rounded to a code, as a number again.
struct Rounding {
  float scale = 0.0f, low = 0.0f, high = 0.0f;
  explicit Rounding(const Quantization& q)
      : scale(q.scale), low(static_cast<float>(-q.zero_code())), high(static_cast<float>(255 - q.zero_code())) {}
  // steps: x / scale.
  V OfSteps(V steps) const {
    const V bounded = Simd::Min(Simd::Set1(high), Simd::Max(Simd::Set1(low), steps));
    return Simd::Mul(Simd::Round(bounded), Simd::Set1(scale));
  }
  V Of(V x) const { return OfSteps(Simd::Div(x, Simd::Set1(scale))); }
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
  float unit, scale;  // unit: of products, in steps of the first rounding where it is that of products
  bool has_score, has_scaled, has_biased;
  Rounding score, scaled, biased;

  explicit FloatScores(const QuantizedAttentionArgs& args)
      : unit(Finite(double{args.query.scale * args.key.scale / (args.score.given() ? args.score.scale : 1.0f)})),
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
      V x = Simd::Mul(LoadAsFloats(products + k), Simd::Set1(unit));
      if (has_score) x = score.OfSteps(x);
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
  alignas(64) int32_t products[Int8::kRows * kTileKeys] = {};
  float bias[kTileKeys];
  const QuantizedAttentionArgs& args = *p.args;
  const PairBias& pair_bias = args.attention.scores.bias;
  const FloatScores scores(args);
  const int64_t head = rows.b * args.attention.shape.G + rows.g, end = RoundUp(rows.count, Int8::kRows);
  Fill(s.float_max, s.float_max + s.padded_m * kWidth, -__builtin_inff());
  for (int64_t i = 0; i < visited; ++i) {
    const int64_t first = int64_t{s.tiles[i]} * kTileKeys, count = Min(kTileKeys, args.attention.shape.T - first);
    for (int64_t row = 0; row < end; row += Int8::kRows) {
      const uint64_t* const allowed = s.allowed + i * s.padded_m + row;
      const uint64_t wanted = KeysOfStrip(allowed);
      if (wanted == 0) continue;
      MultiplyTile(p, s, head, s.tiles[i], row, wanted, products);
      for (int64_t r = 0; r < Min(Int8::kRows, rows.count - row); ++r) {
        if (allowed[r] == 0) continue;
        const bool has_bias = pair_bias.data != nullptr;
        if (has_bias) LoadBias(pair_bias, rows, row + r, first, count, bias);
        scores.Of(products + r * kTileKeys, has_bias ? bias : nullptr, allowed[r],
                  s.scores + (i * s.padded_m + row + r) * kTileKeys, s.float_max + (row + r) * kWidth);
      }
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_SCORES_H_
