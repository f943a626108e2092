// SPDX-License-Identifier: Apache-2.0
// Choose blocks: pooled queries and keys, the means of neighbouring ones, whose products estimate the scores of blocks.
// plugins/core/contract/chosen_blocks.h has the definition.
#ifndef STOF_CPU_ATTENTION_POOLING_H_
#define STOF_CPU_ATTENTION_POOLING_H_

#include <cstdint>

#include "cpu/attention/attention.h"
#include "cpu/attention/scratch.h"
#include "cpu/simd/math.h"
#include "cpu/simd/quantized.h"

namespace stof {
namespace cpu {
namespace {

// sum += a row of `size` elements. Both end with zeros up to whole panels. converted: memory of such a row.
inline void AddRow(const char* from, DType dtype, int64_t size, float* converted, float* sum) {
  const int64_t padded = RoundUp(size, kPanel);
  const float* row = reinterpret_cast<const float*>(from);
  if (dtype != DType::kF32 || size < padded) {
    KvToFloats(from, dtype, size, converted);
    Fill(converted + size, converted + padded, 0.0f);
    row = converted;
  }
  for (int64_t d = 0; d < padded; d += kWidth)
    Simd::Store(sum + d, Simd::Add(Simd::Load(sum + d), Simd::Load(row + d)));
}

// Multiplies a row of whole panels by `factor`, and rounds it to a type.
inline void ScaleAndRound(float factor, DType dtype, int64_t padded, float* row) {
  const V by = Simd::Set1(factor);
  for (int64_t d = 0; d < padded; d += kWidth) {
    const V x = Simd::Mul(Simd::Load(row + d), by);
    Simd::Store(row + d, dtype == DType::kF16 ? RoundF16(x) : dtype == DType::kBF16 ? RoundBf16(x) : x);
  }
}

// Packs kPanel pooled keys, of the keys from key0 on. rows: of KV head g. Bit j: pooled key j has a key.
inline uint32_t PackPooledPanel(const AttentionProblem& problem, const Rows& rows, int64_t b, int64_t g, int64_t key0,
                                const Scratch& scratch, float* to) {
  const AttentionArgs& args = *problem.args;
  const int64_t end = EndOfKeys(args, b), ld = scratch.ldq;
  const uint8_t* const pad = args.mask.pad == nullptr ? nullptr : args.mask.pad + b * args.shape.T;
  float* const converted = scratch.pooling_rows + kPanel * ld;
  uint32_t found = 0;
  for (int64_t j = 0; j < kPanel; ++j) {
    float* const sum = scratch.pooling_rows + j * ld;
    Fill(sum, sum + ld, 0.0f);
    const int64_t first = key0 + j * kPooledKeys, last = Min(first + kPooledKeys, end);
    int count = 0;
    for (int64_t key = first; key < last; ++key) {
      if (pad != nullptr && pad[key] == 0) continue;
      AddRow(rows.At(key), KvType(args.shape), args.shape.D, converted, sum);
      ++count;
    }
    if (count == 0) continue;
    if (args.kv.key_scale.data != nullptr) ScaleRow(args.kv.key_scale, g, args.shape.D, sum);
    ScaleAndRound(1.0f / static_cast<float>(count), args.shape.dtype, ld, sum);
    found |= 1u << j;
  }
  PackPanel(scratch.pooling_rows, ld, kPanel, args.shape.D, to);
  return found;
}

// The pooled queries of rows [row0, row0 + rows) of a head, times scale, as rows of ldq; then zeros up to whole strips.
// rows_of_head: of all its queries.
inline void PoolQueries(const AttentionArgs& args, const Rows& rows_of_head, int64_t row0, int64_t rows,
                        const Scratch& scratch) {
  const int64_t ld = scratch.ldq;
  float* sum = scratch.pooled_queries;
  Fill(sum, sum + RoundUp(kPooledQueriesOfBlock, kStrip) * ld, 0.0f);
  for (int64_t first = 0; first < rows; first += kPooledQueries, sum += ld) {
    const int64_t last = Min(first + kPooledQueries, rows);
    for (int64_t row = first; row < last; ++row) {
      AddRow(rows_of_head.At(row0 + row), args.shape.dtype, args.shape.D, scratch.pooling_rows, sum);
    }
    ScaleAndRound(1.0f / static_cast<float>(last - first), args.shape.dtype, ld, sum);
    ScaleAndRound(args.scores.scale, DType::kF32, ld, sum);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_POOLING_H_
