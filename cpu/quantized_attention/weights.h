// SPDX-License-Identifier: Apache-2.0
// Weights of a tile row, rounded by the row's final maximum and sum, and their products with the values.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_WEIGHTS_H_
#define STOF_CPU_QUANTIZED_ATTENTION_WEIGHTS_H_

#include <cstdint>

#include "cpu/quantized_attention/scores.h"

namespace stof {
namespace cpu {
namespace {

// What became of a row.
enum class RowState : uint8_t { kWeighted, kEmpty, kNan };

inline uint8_t MaxOfBytes(const uint8_t* bytes) {
  uint8_t most = 0;
  for (int k = 0; k < kTileKeys; ++k) most = bytes[k] > most ? bytes[k] : most;
  return most;
}

// The sum of a row's exponentials, the largest of which is 1, and what shifts its scores; the exponentials of scores in
// fp32 take the place of these. NaN where a score is; 0 of a row without an allowed key.
struct RowSum {
  double sum = 0.0;
  uint8_t most = 0;  // the largest code, where scores are codes
  RowState State() const { return sum > 0.0 ? RowState::kWeighted : sum != sum ? RowState::kNan : RowState::kEmpty; }
  float LargestWeight() const { return sum > 0.0 ? static_cast<float>(1.0 / sum) : 0.0f; }
};

inline RowTiles TilesOfRow(const RowScratch& s, int64_t row, int64_t visited) {
  return {s.codes + row * kTileKeys, s.allowed + row, visited, s.padded_m};
}

inline RowSum SumScoreCodes(const RowScratch& s, int64_t row, int64_t visited) {
  RowSum found;
  found.most = MaxOfBytes(s.byte_max + row * kTileKeys);
  const uint64_t sum = SumExponents(TilesOfRow(s, row, visited), *s.tables, found.most);
  found.sum = static_cast<double>(sum) / 2147483648.0;
  return found;
}

inline RowSum SumScores(const RowScratch& s, int64_t row, int64_t visited) {
  RowSum found;
  const float most = Simd::ReduceMax(Simd::Load(s.float_max + row * kWidth));
  // Of a row without a finite score only NaN counts.
  const V shift = Simd::Set1(most == -__builtin_inff() ? 0.0f : most);
  for (int64_t i = 0; i < visited; ++i) {
    if (s.allowed[i * s.padded_m + row] == 0) continue;
    float* const x = s.scores + (i * s.padded_m + row) * kTileKeys;
    V sums = Simd::Set1(0.0f);
    for (int k = 0; k < kTileKeys; k += kWidth) {
      const V exponential = ExpOfScore(Simd::Sub(Simd::Load(x + k), shift));
      Simd::Store(x + k, exponential);
      sums = Simd::Add(sums, exponential);
    }
    found.sum += double{Simd::ReduceAdd(sums)};
  }
  return found;
}

inline RowSum SumRow(const QuantizedProblem& p, const RowScratch& s, int64_t row, int64_t visited) {
  return p.keeps_codes ? SumScoreCodes(s, row, visited) : SumScores(s, row, visited);
}

// What exponentials are multiplied by to become steps of the weight's rounding.
inline float StepsOfWeight(const QuantizedProblem& p, const RowSum& row) {
  return row.State() == RowState::kWeighted ? Finite(1.0 / (row.sum * double{p.args->weight.scale})) : 0.0f;
}

// Codes of weights from codes of scores.
inline void RoundWeightCodes(const QuantizedProblem& p, const RowScratch& s, int64_t row, int64_t visited,
                             const RowSum& found) {
  const Quantization& weight = p.args->weight;
  const float factor = StepsOfWeight(p, found);
  uint8_t table[257];
  const int used = RoundWeightTable(s.tables->weights, factor, weight.zero_code(), table);
  table[256] = static_cast<uint8_t>(weight.zero_code());
  s.weight_sums[row] = LookWeights(TilesOfRow(s, row, visited), table, used, found.most);
}

// Codes of weights from exponentials.
inline void RoundWeights(const QuantizedProblem& p, const RowScratch& s, int64_t row, int64_t visited,
                         const RowSum& found) {
  const int32_t zero = p.args->weight.zero_code();
  const float factor = StepsOfWeight(p, found), high = static_cast<float>(255 - zero);
  const bool is_weighted = found.State() == RowState::kWeighted;
  int64_t total = 0;
  for (int64_t i = 0; i < visited; ++i) {
    uint8_t* const codes = s.codes + (i * s.padded_m + row) * kTileKeys;
    if (s.allowed[i * s.padded_m + row] == 0 || !is_weighted) {
      Fill(codes, codes + kTileKeys, static_cast<uint8_t>(zero));
      continue;
    }
    const float* const x = s.scores + (i * s.padded_m + row) * kTileKeys;
    int32_t added = 0;
    for (int k = 0; k < kTileKeys; ++k) {
      const float steps = x[k] * factor;
      const float rounded = ((steps > high ? high : steps) + kRoundToInteger) - kRoundToInteger;
      const int32_t code = static_cast<int32_t>(rounded) + zero;
      codes[k] = static_cast<uint8_t>(code);
      added += code - zero;
    }
    total += added;
  }
  s.weight_sums[row] = total;
}

inline RowState WeighRow(const QuantizedProblem& p, const RowScratch& s, int64_t row, int64_t visited) {
  const RowSum found = SumRow(p, s, row, visited);
  p.keeps_codes ? RoundWeightCodes(p, s, row, visited, found) : RoundWeights(p, s, row, visited, found);
  return found.State();
}

// What a strip of Int8::kRows rows multiplies of visited tile i. With a zero point other than 0, or kRowOffset,
// forbidden keys have factors other than 0: then all words count.
inline StripTile MakeStripTile(const QuantizedProblem& p, const RowScratch& s, int64_t i, int64_t row) {
  const auto zero = static_cast<uint8_t>(p.args->weight.zero_code());
  const uint8_t* const codes = s.codes + (i * s.padded_m + row) * kTileKeys;
  const uint64_t wanted = KeysOfStrip(s.allowed + i * s.padded_m + row);
  if (wanted == 0 || !HasWeights(codes, zero)) return {};
  if (zero != 0 || Int8::kRowOffset != 0) return {LargestLaneSum(codes), 0, kTileKeys / 4};
  const int first = __builtin_ctzll(wanted) / 4, last = (63 - __builtin_clzll(wanted)) / 4;
  return {LargestLaneSum(codes), static_cast<int16_t>(first), static_cast<int16_t>(last - first + 1)};
}

// The outputs of Int8::kRows rows for kVectors vectors of columns from `column` on: [kRows, columns] in s.sums, in
// units of the scales of weights and values.
template <int kVectors>
void MultiplyValues(const QuantizedProblem& p, const RowScratch& s, int64_t head, int64_t row, int64_t column,
                    int64_t visited) {
  constexpr int kColumns = kVectors * Int8::kLanes;
  const int64_t stride = 4 * p.dv_padded;
  const int32_t moved_zero = p.args->weight.zero_code() - Int8::kRowOffset;
  const int32_t value_zero = SignedZero(p.args->value);
  alignas(64) int32_t terms[kColumns], sums[kColumns];
  for (int64_t begin = 0; begin == 0 || begin < visited; begin += kExactKeys / kTileKeys) {
    const int64_t end = Min(visited, begin + kExactKeys / kTileKeys);
    ValueSums<kVectors> added;
    if (moved_zero != 0) Fill(terms, terms + kColumns, 0);
    for (int64_t i = begin; i < end; ++i) {
      const StripTile& strip_tile = s.strip[i];
      if (strip_tile.words == 0) continue;
      const int64_t tile = head * p.key_tiles + s.tiles[i];
      added.AddTile(s.codes + (i * s.padded_m + row) * kTileKeys, strip_tile,
                    p.values + tile * kTileKeys * p.dv_padded + 4 * column, stride);
      if (moved_zero == 0) continue;
      const int32_t* const values = p.value_sums + tile * p.dv_padded + column;
      for (int c = 0; c < kColumns; ++c) terms[c] -= moved_zero * values[c];
    }
    added.Finish();
#pragma GCC unroll 6
    for (int r = 0; r < Int8::kRows; ++r) {
      added.StoreRow(r, sums);
      float* const to = s.sums + r * kColumns;
      for (int c = 0; c < kColumns && moved_zero != 0; ++c) sums[c] += terms[c];
      if (begin == 0) {
        for (int c = 0; c < kColumns; ++c) to[c] = static_cast<float>(sums[c]);
      } else {
        for (int c = 0; c < kColumns; ++c) to[c] += static_cast<float>(sums[c]);
      }
    }
  }
  for (int r = 0; r < Int8::kRows && value_zero != 0; ++r) {
    const auto moved = static_cast<float>(s.weight_sums[row + r] * value_zero);
    for (int c = 0; c < kColumns; ++c) s.sums[r * kColumns + c] -= moved;
  }
}

using MultiplyFunction = void (*)(const QuantizedProblem&, const RowScratch&, int64_t, int64_t, int64_t, int64_t);
inline MultiplyFunction MultiplyOf(int64_t vectors) {
  constexpr int kMost = Int8::kVectors;
  static constexpr MultiplyFunction kOf[] = {MultiplyValues<1>, MultiplyValues<2>, MultiplyValues<(kMost > 2 ? 3 : 1)>,
                                             MultiplyValues<(kMost > 3 ? 4 : 1)>};
  return kOf[vectors - 1];
}

inline float* OutputRow(const QuantizedProblem& p, const TileRows& rows, int64_t row) {
  const AttentionOutput& output = p.args->attention.output;
  return static_cast<float*>(output.data) + rows.b * output.stride.b + rows.h * output.stride.h +
         (rows.first + row) * output.stride.s;
}

inline void WriteOutputs(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited,
                         const RowState* states) {
  const int64_t Dv = p.args->attention.shape.Dv, head = rows.b * p.args->attention.shape.G + rows.g;
  const float unit = Finite(double{p.args->weight.scale} * double{p.args->value.scale});
  for (int64_t row = 0; row < rows.count; row += Int8::kRows) {
    for (int64_t i = 0; i < visited; ++i) s.strip[i] = MakeStripTile(p, s, i, row);
    for (int64_t column = 0; column < Dv; column += Int8::kVectors * Int8::kLanes) {
      const int64_t vectors = Min(Int8::kVectors, (p.dv_padded - column) / Int8::kLanes);
      MultiplyOf(vectors)(p, s, head, row, column, visited);
      const int64_t count = Min(vectors * Int8::kLanes, Dv - column);
      for (int64_t r = 0; r < Min(Int8::kRows, rows.count - row); ++r) {
        if (states[row + r] != RowState::kWeighted) continue;
        float* const to = OutputRow(p, rows, row + r) + column;
        const float* const from = s.sums + r * vectors * Int8::kLanes;
        for (int64_t c = 0; c < count; ++c) to[c] = from[c] * unit;
      }
    }
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_WEIGHTS_H_
