// SPDX-License-Identifier: Apache-2.0
// Quantized attention: scores of a tile row as codes, their row sums, then codes of weights times values.
#define STOF_INT8_MATMULS
#include "cpu/kernel_table.h"
#include "cpu/quantized_attention/quantized_attention.h"
#include "cpu/quantized_attention/weights.h"

namespace stof {
namespace cpu {
namespace {

inline int64_t KeyWords(int64_t D) { return RoundUp(D * Int8::kKeyBytes, 4) / 4; }

inline int64_t PaddedValueSize(int64_t Dv) { return RoundUp(Dv, Int8::kLanes); }

inline int64_t ScratchBytes(const QuantizedProblem& p) {
  RowScratch scratch;
  return MakeScratch(p, nullptr, &scratch);
}

inline void Prepare(const QuantizedProblem& p, void* memory) {
  RowScratch s;
  MakeScratch(p, static_cast<char*>(memory), &s);
  if (p.keeps_codes) FillScoreCodeTables(p, s.tables);
}

inline void FindAll(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited) {
  p.keeps_codes ? FindScoreCodes(p, rows, s, visited) : FindScores(p, rows, s, visited);
}

// Attends the visited tiles. Rows behind the last one, which complete a register block, are computed and dropped.
inline void AttendVisited(const QuantizedProblem& p, const TileRows& rows, const RowScratch& s, int64_t visited,
                          RowState* states) {
  FindAll(p, rows, s, visited);
  for (int64_t row = 0; row < RoundUp(rows.count, Int8::kRows); ++row) {
    states[row] = WeighRow(p, s, row, visited);
  }
  WriteOutputs(p, rows, s, visited, states);
}

// A row whose keys all have weight 1 / T.
inline void WriteMean(const QuantizedProblem& p, const TileRows& rows, int64_t row) {
  const AttentionShape& shape = p.args->attention.shape;
  const Quantization& weight = p.args->weight;
  const int64_t head = rows.b * shape.G + rows.g;
  const float steps = 1.0f / static_cast<float>(shape.T) / weight.scale;
  const int32_t code = UnsignedCode(steps, weight) - weight.zero_code();
  const double unit = code * double{weight.scale} * double{p.args->value.scale};
  float* const to = OutputRow(p, rows, row);
  for (int64_t d = 0; d < shape.Dv; ++d) {
    int64_t sum = -shape.T * SignedZero(p.args->value);
    for (int64_t tile = 0; tile < p.key_tiles; ++tile)
      sum += p.value_sums[(head * p.key_tiles + tile) * p.dv_padded + d];
    to[d] = static_cast<float>(unit * static_cast<double>(sum));
  }
}

inline void WriteSame(const QuantizedProblem& p, const TileRows& rows, int64_t row, float value) {
  float* const to = OutputRow(p, rows, row);
  Fill(to, to + p.args->attention.shape.Dv, value);
}

inline EmptyRows PolicyOf(const QuantizedProblem& p) {
  return p.args->attention.shape.T == 0 ? EmptyRows::kZero : p.args->attention.mask.empty_rows;
}

// Bytes of a query row behind its last whole 64: the depth of tiles 6 and 7. 64 where nothing is left.
inline int LastDepthBytes(const QuantizedProblem& p) {
  const auto left = static_cast<int>(4 * p.key_words % kWholeDepthBytes);
  return left > 0 ? left : kWholeDepthBytes;
}

// Begins a tile row: the scratch, and the queries in it.
inline TileRows Begin(const QuantizedProblem& p, int64_t item, void* memory, RowScratch* s) {
  MakeScratch(p, static_cast<char*>(memory), s);
  const TileRows rows = RowsOfItem(p, item);
  PackQueries(p, rows.b, rows.h, rows.first, rows.count, s->padded_m, s->queries, s->row_terms);
  return rows;
}

inline float Measure(const QuantizedProblem& p, int64_t item, void* memory) {
  const ConfiguredTiles tiles(LastDepthBytes(p));
  RowScratch s;
  const TileRows rows = Begin(p, item, memory, &s);
  const EmptyRows policy = PolicyOf(p);
  float largest = 0.0f;
  uint64_t again = 0;
  const auto take = [&](float weight) { largest = weight > largest ? weight : largest; };
  const int64_t visited = KeyTileList(p, rows, s).OfMask();
  FindAll(p, rows, s, visited);
  for (int64_t row = 0; row < rows.count; ++row) {
    const RowSum found = SumRow(p, s, row, visited);
    take(found.LargestWeight());
    if (found.State() != RowState::kEmpty) continue;
    if (policy == EmptyRows::kMean) take(1.0f / static_cast<float>(p.args->attention.shape.T));
    if (policy == EmptyRows::kAll) again |= uint64_t{1} << row;
  }
  if (again == 0) return largest;
  const int64_t all = KeyTileList(p, rows, s).OfAll(again);
  FindAll(p, rows, s, all);
  for (int64_t row = 0; row < rows.count; ++row) {
    if ((again >> row & 1) != 0) take(SumRow(p, s, row, all).LargestWeight());
  }
  return largest;
}

inline void Attend(const QuantizedProblem& p, int64_t item, void* memory) {
  const ConfiguredTiles tiles(LastDepthBytes(p));
  RowScratch s;
  const TileRows rows = Begin(p, item, memory, &s);
  RowState states[kMostQuantizedRows];
  AttendVisited(p, rows, s, KeyTileList(p, rows, s).OfMask(), states);
  const EmptyRows policy = PolicyOf(p);
  uint64_t again = 0;
  for (int64_t row = 0; row < rows.count; ++row) {
    if (states[row] == RowState::kNan) WriteSame(p, rows, row, __builtin_nanf(""));
    if (states[row] != RowState::kEmpty) continue;
    if (policy == EmptyRows::kZero) WriteSame(p, rows, row, 0.0f);
    if (policy == EmptyRows::kNan) WriteSame(p, rows, row, __builtin_nanf(""));
    if (policy == EmptyRows::kMean) WriteMean(p, rows, row);
    if (policy == EmptyRows::kAll) again |= uint64_t{1} << row;
  }
  if (again == 0) return;
  AttendVisited(p, rows, s, KeyTileList(p, rows, s).OfAll(again), states);
  for (int64_t row = 0; row < rows.count; ++row) {
    // What is left has a bias of -inf or NaN for all keys.
    if ((again >> row & 1) != 0 && states[row] != RowState::kWeighted) WriteSame(p, rows, row, __builtin_nanf(""));
  }
}

}  // namespace

STOF_EXPORT_KERNELS(QuantizedAttentionKernels, quantized_attention) = {
    KeyWords, PaddedValueSize, ScratchBytes, Prepare, PackHead, Measure, Attend,
};

}  // namespace cpu
}  // namespace stof
