// SPDX-License-Identifier: Apache-2.0
// Sums of down rows for many tokens that need most of them.
//
// The sums of a column lie together, one for each token, and tokens are multiplied in panels as in dots_many_tokens.h.
// Rows are added to all tokens, in their order: hidden values of tokens that do not need a row are 0.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_PANELS_H_
#define STOF_CPU_SPARSE_MLP_DOWN_PANELS_H_

#include "cpu/sparse_mlp/dots_many_tokens.h"
#include "cpu/sparse_mlp/down.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kPanelSumRows = 64;      // for which sums are loaded and stored once
constexpr int64_t kPanelSumColumns = 240;  // of a piece of these rows: it stays in the L2 cache, and is whole tiles
constexpr int64_t kPanelSumStride = kPanelSumColumns + 32;  // 17 cache lines: rows lie in different cache sets
static_assert(kPanelSumColumns % kMlpPadding == 0, "a piece begins where quantized values may begin");

// sums[i * sums_stride + t] += the sum over rows of rows[k * kPanelSumStride + i] * h[k * kMlpTokens + t], for kColumns
// columns and kPanels panels of tokens. Meanwhile byte next_at of each next[k] is prefetched.
template <int kPanels, int kColumns>
void PanelSumTile(const float* rows, int64_t count, const float* h, const char* const* next, int64_t next_at,
                  float* sums, int64_t sums_stride) {
  constexpr int kVectors = kPanels * kPanelVectors;
  V sum[kColumns][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < kColumns; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Load(sums + i * sums_stride + v * kWidth);
  }
  for (int64_t k = 0; k < count; ++k) {
    __builtin_prefetch(next[k] + next_at, 0, 2);
    V y[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) y[v] = Simd::Load(h + k * kMlpTokens + v * kWidth);
#if defined(STOF_NEON)
    AddStep(rows + k * kPanelSumStride, y, sum);
#else
#pragma GCC unroll 12
    for (int i = 0; i < kColumns; ++i) {
      const V value = Simd::Set1(rows[k * kPanelSumStride + i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Fma(value, y[v], sum[i][v]);
    }
#endif
  }
#pragma GCC unroll 12
  for (int i = 0; i < kColumns; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::Store(sums + i * sums_stride + v * kWidth, sum[i][v]);
  }
}

// The same for all `columns` columns and `panels` panels. column_bits: of a column in a row that is read next.
template <int kPanels = kDotPanels>
void PanelSumTiles(int64_t panels, const float* rows, int64_t count, int64_t columns, const float* h,
                   const char* const* next, int64_t column_bits, float* sums, int64_t sums_stride) {
  if constexpr (kPanels > 1) {
    if (panels < kPanels) {
      return PanelSumTiles<kPanels - 1>(panels, rows, count, columns, h, next, column_bits, sums, sums_stride);
    }
  }
  constexpr int kColumns = RowsOfTile(kPanels);
  int64_t c = 0;
  for (; c + kColumns <= columns; c += kColumns) {
    PanelSumTile<kPanels, kColumns>(rows + c, count, h, next, c * column_bits / 8, sums + c * sums_stride, sums_stride);
  }
  for (; c < columns; ++c) {
    PanelSumTile<kPanels, 1>(rows + c, count, h, next, c * column_bits / 8, sums + c * sums_stride, sums_stride);
  }
  if (panels > kPanels) {
    PanelSumTiles(panels - kPanels, rows, count, columns, h + kPanels * kPanelTokens, next, column_bits,
                  sums + kPanels * kPanelTokens, sums_stride);
  }
}

// h[kMlpTokens] = the hidden values of neuron i of the list, zeros beyond the last token.
inline void LoadHidden(const MlpBlock& b, int64_t i, float* h) {
  const float* const hidden = b.hidden + i * b.tokens;
  Copy(hidden, hidden + b.tokens, h);
  Fill(h + b.tokens, h + kMlpTokens, 0.0f);
}

// Columns [begin, end) of the sums of a part, all rows for all tokens.
inline void AddPanels(const MlpBlock& b, int64_t part, int64_t begin, int64_t end, float* sums) {
  const int64_t first = b.part_begin[part], last = b.part_begin[part + 1], count = last - first;
  const int64_t stride = PanelSumsStride(b.tokens);
  const int64_t in_l2 = kSumBytes / (stride * static_cast<int64_t>(sizeof(float)));
  const int64_t step = Max(kLeastColumns, in_l2) / kPanelSumColumns * kPanelSumColumns;
  const int64_t bits = b.down.bits > 0 ? b.down.bits : 8 * SizeOf(b.down.dtype);
  const int64_t groups = (count + kPanelSumRows - 1) / kPanelSumRows;
  alignas(64) float rows[kPanelSumRows * kPanelSumStride];
  alignas(64) float h[kPanelSumRows * kMlpTokens];
  const char* next[kPanelSumRows];
  const auto row = [&](int64_t i, int64_t n) {
    return b.down.data + b.neurons[Min(i, last - 1)] * b.down.stride + BytesOf(b.down, n);
  };
  for (int64_t n = begin; n < end; n += step) {
    const int64_t behind = Min(end, n + step);
    for (int64_t g = 0; g < groups; ++g) {  // of as many rows each, give or take one
      const int64_t from = first + count * g / groups, some = first + count * (g + 1) / groups - from;
      for (int64_t i = 0; i < some; ++i) LoadHidden(b, from + i, h + i * kMlpTokens);
      for (int64_t c = n; c < behind; c += kPanelSumColumns) {
        const int64_t columns = Min(kPanelSumColumns, behind - c);
        for (int64_t i = 0; i < some; ++i) {
          LoadDownRow(b.down, b.neurons[from + i], c, columns, rows + i * kPanelSumStride);
          next[i] = c + columns < behind ? row(from + i, c + columns) : row(from + some + i, n);
        }
        PanelSumTiles(stride / kPanelTokens, rows, some, columns, h, next, bits, sums + c * stride, stride);
      }
    }
  }
}

// The same, but each row for the tokens alone that need it.
inline void AddNeededPanels(const MlpBlock& b, int64_t part, int64_t begin, int64_t end, float* sums) {
  const int64_t stride = PanelSumsStride(b.tokens);
  float row[kPanelSumColumns];
  float h[kMlpTokens];
  for (int64_t i = b.part_begin[part]; i < b.part_begin[part + 1]; ++i) {
    LoadHidden(b, i, h);
    for (int64_t n = begin; n < end; n += kPanelSumColumns) {
      const int64_t columns = Min(kPanelSumColumns, end - n);
      LoadDownRow(b.down, b.neurons[i], n, columns, row);
      for (int64_t c = 0; c < columns; ++c) {
        const V value = Simd::Set1(row[c]);
        float* const of_column = sums + (n + c) * stride;
        for (int64_t t = 0; t < stride; t += kWidth) {
          const V sum = Simd::Load(of_column + t);
          const auto needed = static_cast<uint32_t>(b.list_masks[i] >> t);  // a bit for each lane, and others
          Simd::Store(of_column + t, Simd::Where(needed, Simd::Fma(value, Simd::Load(h + t), sum), sum));
        }
      }
    }
  }
}

inline void DownPanels(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  const int64_t stride = PanelSumsStride(b.tokens);
  float* const sums = b.sums + part * stride * b.sums_stride;
  Fill(sums + begin * stride, sums + end * stride, 0.0f);
  AddPanels(b, part, begin, end, sums);
  if (AreFinite(sums + begin * stride, (end - begin) * stride)) return;
  // A row that is not finite makes the sums of tokens that do not need it NaN.
  Fill(sums + begin * stride, sums + end * stride, 0.0f);
  AddNeededPanels(b, part, begin, end, sums);
}

// y[t * kColumns + i] = the sum of all parts of column begin + i, at most kColumns of them.
template <int64_t kColumns>
void SumPanels(const MlpBlock& b, int64_t begin, int64_t end, float* y) {
  const int64_t stride = PanelSumsStride(b.tokens);
  for (int64_t n = begin; n < end; ++n) {
    alignas(64) float sums[kMlpTokens];
    Copy(b.sums + n * stride, b.sums + (n + 1) * stride, sums);
    for (int64_t part = 1; part < kMlpParts; ++part) {
      const float* const more = b.sums + (part * b.sums_stride + n) * stride;
      for (int64_t t = 0; t < stride; ++t) sums[t] += more[t];
    }
    for (int64_t t = 0; t < b.tokens; ++t) y[t * kColumns + n - begin] = sums[t];
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_PANELS_H_
