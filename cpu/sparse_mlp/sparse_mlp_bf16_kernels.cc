// SPDX-License-Identifier: Apache-2.0
// The sparse MLP's matmuls of many tokens with factors in bf16.
#define STOF_BF16_MATMULS
#include <cstring>

#include "cpu/kernel_table.h"
#include "cpu/sparse_mlp/bf16_tiles.h"
#include "cpu/sparse_mlp/down.h"
#include "cpu/sparse_mlp/sparse_mlp_bf16.h"

namespace stof {
namespace cpu {
namespace {

// Rows of buffers lie an odd number of cache lines apart: otherwise they would share cache sets.
constexpr int64_t kOddLine = 32;

void FillBf16Panel(const float* x, int64_t stride, int64_t tokens, int64_t size, uint16_t* panel, float* rounded) {
  Fill(panel, panel + Bf16PanelValues(size), uint16_t{0});
  constexpr int64_t kStep = 256;
  Bf16 some[kStep];
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t k = 0; k < size; k += kStep) {
      const int64_t count = Min(kStep, size - k);
      RoundToBf16(x + t * stride + k, count, some);
      ToFloats(some, DType::kBF16, count, rounded + t * stride + k);
      for (int64_t i = 0; i < count; ++i) panel[((k + i) / 2 * kPanelTokens + t) * 2 + (k + i) % 2] = some[i];
    }
    // Pairs of a row and a token read whole vectors, as of DotProblem::x.
    Fill(rounded + t * stride + size, rounded + t * stride + RoundUp(size, kMlpPadding), 0.0f);
  }
}

constexpr int64_t kDotDepthBf16 = 256;  // of rows and panels at a time: they stay in the L1 cache

// to[depth] = a row, zeros up to the padding.
inline void CopyRow(const char* row, int64_t depth, Bf16* to) {
  int64_t k = 0;
  for (; k + kBf16Padding <= depth; k += kBf16Padding) std::memcpy(to + k, row + 2 * k, 2 * kBf16Padding);
  if (k == depth) return;
  Fill(to + k, to + k + kBf16Padding, Bf16{0});
  std::memcpy(to + k, row + 2 * k, static_cast<size_t>(depth - k) * 2);
}

// Multiplies a buffer of `rows` rows by all panels, some rows and panels at a time.
template <typename Prefetch>
void AddDotTiles(const Bf16Factors& f, int64_t rows, int64_t panels, const Prefetch& prefetch) {
  for (int64_t j = 0; j < panels; j += kMostTilePanels) {
    Bf16Factors tile = f;
    tile.panels += j * f.panel_stride;
    tile.c += j * kPanelWidth;
    AddBf16Tile(tile, rows, Min(kMostTilePanels, panels - j), prefetch);
  }
}

void DotsBf16(const DotProblem& p, int64_t first, int64_t last, float* out, int64_t row_stride, int64_t token_stride) {
  static_assert(kPanelTokens == kPanelWidth && kMlpNeurons % kMostTileRows % kRowUnit == 0);
  constexpr int64_t kStride = kDotDepthBf16 + kOddLine;
  const ConfiguredTiles tiles(kWholeDepthBytes);
  const int64_t size = p.rows.size, panels = (p.tokens + kPanelTokens - 1) / kPanelTokens, count = last - first;
  alignas(64) float sums[kMlpNeurons * kMlpTokens];
  alignas(64) Bf16 rows[kMostTileRows * kStride];
  Fill(sums, sums + RoundUp(count, kRowUnit) * kMlpTokens, 0.0f);
  Fill(rows, rows + kMostTileRows * kStride, Bf16{0});
  const auto row_at = [&](int64_t i, int64_t k) {
    return p.rows.data + NeuronOf(p, Min(i, p.count - 1)) * p.rows.stride + k * 2;
  };
  for (int64_t k0 = 0; k0 < size; k0 += kDotDepthBf16) {
    const int64_t depth = Min(kDotDepthBf16, size - k0), padded = RoundUp(depth, kBf16Padding);
    const bool is_last = k0 + depth == size;
    for (int64_t i = 0; i < count; i += kMostTileRows) {
      const int64_t some = Min(kMostTileRows, count - i);
      const char* next[kMostTileRows];
      for (int64_t r = 0; r < some; ++r) {
        CopyRow(row_at(first + i + r, k0), depth, rows + r * kStride);
        next[r] = is_last ? row_at(last + i + r, 0) : row_at(first + i + r, k0 + depth);
      }
      const Bf16Factors factors = {rows,
                                   kStride,
                                   reinterpret_cast<const Bf16*>(p.x_bf16) + k0 * kPanelTokens,
                                   Bf16PanelValues(size),
                                   padded,
                                   sums + i * kMlpTokens,
                                   kMlpTokens};
      AddDotTiles(factors, some, panels, [&](int64_t pair) {
        for (int64_t r = 0; r < some; ++r) __builtin_prefetch(next[r] + pair * 4, 0, 2);
      });
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t t = 0; t < p.tokens; ++t) out[i * row_stride + t * token_stride] = sums[i * kMlpTokens + t];
  }
}

constexpr int64_t kDownDepth = 128;    // neurons for which sums are loaded and stored once
constexpr int64_t kDownColumns = 192;  // of their rows that are interleaved at a time
constexpr int64_t kDownStep = 1536;    // of sums, which stay in the L2 cache
constexpr int64_t kDownPanels = kDownColumns / kPanelWidth;
constexpr int64_t kDownPanelValues = kDownDepth * kPanelWidth;
static_assert(kDownStep % kDownColumns == 0);

// to[pair, 16, 2] of each panel = columns of two rows; nullptr: a row of zeros. 16 columns are read at a time, but not
// beyond `columns`.
inline void InterleaveRows(const Bf16* even, const Bf16* odd, int64_t columns, Bf16* to) {
  for (int64_t n = 0; n < columns; n += kPanelWidth) {
    Bf16* const pair = to + n / kPanelWidth * kDownPanelValues;
    const int64_t some = Min(kPanelWidth, columns - n);
#if defined(__AVX512F__)
    const auto load = [&](const Bf16* row) {
      const auto mask = static_cast<__mmask16>((1u << some) - 1);
      return row == nullptr ? _mm512_setzero_si512() : _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row + n));
    };
    _mm512_storeu_si512(pair, _mm512_or_si512(load(even), _mm512_slli_epi32(load(odd), 16)));
#else
    for (int64_t i = 0; i < kPanelWidth; ++i) {
      pair[2 * i] = i < some && even != nullptr ? even[n + i] : Bf16{0};
      pair[2 * i + 1] = i < some && odd != nullptr ? odd[n + i] : Bf16{0};
    }
#endif
  }
}

// The sums of a part, which Add adds its neurons to.
class DownPart {
 public:
  DownPart(const MlpBlock& block, int64_t part)
      : b_(block), end_(block.part_begin[part + 1]), sums_(block.sums + part * block.tokens * block.sums_stride) {
    Fill(hidden_, hidden_ + kMlpTokens * kHiddenStride, Bf16{0});
  }

  // Columns [begin, end) of neurons [first, first + count) of the list, at most kDownDepth. leaves_out: rows that are
  // not finite are added to the tokens alone that need them.
  void Add(int64_t first, int64_t count, int64_t begin, int64_t end, bool leaves_out) {
    for (int64_t n = begin; n < end; n += kDownColumns) {
      if (n == begin || leaves_out) PackHiddenRows(first, count);  // the columns before have left out others
      const int64_t columns = Min(kDownColumns, end - n);
      const Bf16* row[kDownDepth];
      for (int64_t i = 0; i < depth_; ++i) {
        const bool is_left_out = i < count && leaves_out && !IsFinite(RowAt(first + i, n), columns);
        row[i] = i < count && !is_left_out ? RowAt(first + i, n) : nullptr;
        // Infinity times the zeros of a row that is left out would be NaN.
        if (is_left_out) ClearHidden(i);
      }
      for (int64_t i = 0; i < depth_; i += 2) InterleaveRows(row[i], row[i + 1], columns, rows_ + i * kPanelWidth);
      const bool is_last = n + columns == end;
      for (int64_t i = 0; i < kDownDepth; ++i) {
        next_[i] = is_last ? RowAt(first + count + i, begin) : RowAt(first + i, n + columns);
      }
      AddColumns(n, columns);
      for (int64_t i = 0; i < count && leaves_out; ++i) {
        if (row[i] == nullptr) AddToTokens(first + i, n, columns);
      }
    }
  }

 private:
  static constexpr int64_t kHiddenStride = kDownDepth + kOddLine;

  // Of a neuron of the part; of the last one for those beyond.
  const Bf16* RowAt(int64_t i, int64_t n) const {
    return reinterpret_cast<const Bf16*>(b_.down.data + b_.neurons[Min(i, end_ - 1)] * b_.down.stride) + n;
  }

  // hidden_[t, i] of `count` neurons, whose values are numbers of bf16 already. Zeros up to the depth.
  void PackHiddenRows(int64_t first, int64_t count) {
    depth_ = RoundUp(count, kBf16Padding);
    for (int64_t i = count; i < depth_; ++i) ClearHidden(i);
    for (int64_t i = 0; i < count; ++i) {
      const float* const from = b_.hidden + (first + i) * b_.tokens;
      for (int64_t t = 0; t < b_.tokens; ++t) {
        uint32_t bits;
        std::memcpy(&bits, from + t, 4);
        hidden_[t * kHiddenStride + i] = static_cast<Bf16>(bits >> 16);
      }
    }
  }

  void ClearHidden(int64_t i) {
    for (int64_t t = 0; t < b_.tokens; ++t) hidden_[t * kHiddenStride + i] = 0;
  }

  static bool IsFinite(const Bf16* row, int64_t columns) {
    bool is_finite = true;
    for (int64_t n = 0; n < columns; ++n) is_finite &= (row[n] & 0x7f80) != 0x7f80;
    return is_finite;
  }

  void AddToTokens(int64_t i, int64_t n, int64_t columns) {
    float row[kDownColumns];
    ToFloats(RowAt(i, n), DType::kBF16, columns, row);
    for (uint64_t left = b_.list_masks[i]; left != 0; left &= left - 1) {
      const int64_t t = __builtin_ctzll(left);
      float* const sums = sums_ + t * b_.sums_stride + n;
      for (int64_t c = 0; c < columns; ++c) sums[c] += b_.hidden[i * b_.tokens + t] * row[c];
    }
  }

  void AddColumns(int64_t n, int64_t columns) {
    const int64_t panels = (columns + kPanelWidth - 1) / kPanelWidth;
    const int64_t row_tiles = (b_.tokens + kMostTileRows - 1) / kMostTileRows;
    for (int64_t j = 0; j < panels; j += kMostTilePanels) {
      for (int64_t i = 0; i < row_tiles; ++i) {
        // As many rows in each tile, give or take one; tile registers have theirs whole.
        const int64_t t = kHasTiles ? i * kMostTileRows : b_.tokens * i / row_tiles;
        const int64_t behind = kHasTiles ? Min(b_.tokens, t + kMostTileRows) : b_.tokens * (i + 1) / row_tiles;
        const Bf16Factors factors = {hidden_ + t * kHiddenStride,
                                     kHiddenStride,
                                     rows_ + j * kDownPanelValues,
                                     kDownPanelValues,
                                     depth_,
                                     sums_ + t * b_.sums_stride + n + j * kPanelWidth,
                                     b_.sums_stride};
        // Each tile of tokens prefetches its share of the rows, a cache line of each: the columns of two panels.
        const int64_t from = 2 * kPrefetchPairs * i / row_tiles, to = 2 * kPrefetchPairs * (i + 1) / row_tiles;
        AddTile(factors, behind - t, Min(kMostTilePanels, panels - j), [&](int64_t pair) {
          for (int64_t r = from; r < to; ++r) __builtin_prefetch(next_[2 * pair + r] + j * kPanelWidth, 0, 2);
        });
      }
    }
  }

  // Behind the last token are sums of another part, which tiles of whole registers would add to.
  template <typename Prefetch>
  static void AddTile(const Bf16Factors& f, int64_t rows, int64_t panels, const Prefetch& prefetch) {
    if (rows % kRowUnit == 0) return AddBf16Tile(f, rows, panels, prefetch);
    constexpr int64_t kStride = kMostTilePanels * kPanelWidth;
    alignas(64) float sums[kMostTileRows * kStride] = {};
    const int64_t columns = panels * kPanelWidth;
    for (int64_t i = 0; i < rows; ++i) Copy(f.c + i * f.c_stride, f.c + i * f.c_stride + columns, sums + i * kStride);
    Bf16Factors own = f;
    own.c = sums, own.c_stride = kStride;
    AddBf16Tile(own, rows, panels, prefetch);
    for (int64_t i = 0; i < rows; ++i) Copy(sums + i * kStride, sums + i * kStride + columns, f.c + i * f.c_stride);
  }

  const MlpBlock& b_;
  const int64_t end_;
  float* const sums_;
  int64_t depth_ = 0;
  const Bf16* next_[kDownDepth];
  alignas(64) Bf16 hidden_[kMlpTokens * kHiddenStride];
  alignas(64) Bf16 rows_[kDownPanels * kDownPanelValues];
};

// Columns [begin, end) of the sums of a part.
inline void AddPartBf16(const MlpBlock& b, int64_t part, int64_t begin, int64_t end, bool leaves_out) {
  const int64_t first = b.part_begin[part], last = b.part_begin[part + 1];
  float* const sums = b.sums + part * b.tokens * b.sums_stride;
  // Sums lie up to a whole vector behind the last column: tiles add to them, and nothing reads them.
  const int64_t behind = RoundUp(end, kPanelWidth);
  for (int64_t t = 0; t < b.tokens; ++t) {
    Fill(sums + t * b.sums_stride + begin, sums + t * b.sums_stride + behind, 0.0f);
  }
  if (first == last) return;
  DownPart down(b, part);
  for (int64_t n = begin; n < end; n += kDownStep) {
    for (int64_t i = first; i < last; i += kDownDepth) {
      down.Add(i, Min(kDownDepth, last - i), n, Min(end, n + kDownStep), leaves_out);
    }
  }
}

void DownBf16(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  const ConfiguredTiles tiles(kWholeDepthBytes);
  AddPartBf16(b, part, begin, end, false);
  // A row of infinity or NaN makes the sums of tokens that do not need it NaN. The order of additions stays.
  if (!AreSumsFinite(b, part, begin, end)) AddPartBf16(b, part, begin, end, true);
}

}  // namespace

STOF_EXPORT_KERNELS(SparseMlpBf16Kernels, sparse_mlp_bf16) = {FillBf16Panel, DotsBf16, DownBf16};

}  // namespace cpu
}  // namespace stof
