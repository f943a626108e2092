// SPDX-License-Identifier: Apache-2.0
// Dot products of weight rows and many tokens, in panels of kPanelTokens: a value of a row times those of a panel, as
// in a matrix product. Included once per instruction set, with STOF_DOT_PANELS panels in a tile.
//
// A dot product adds its terms one by one, in their order. It is computed for tokens that do not need it, too.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_PANELS_H_
#define STOF_CPU_SPARSE_MLP_DOTS_PANELS_H_

#include "cpu/sparse_mlp/dots.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int kDotPanels = STOF_DOT_PANELS;
constexpr int kPanelVectors = kPanelTokens / kWidth;
static_assert(kPanelTokens % kWidth == 0, "a panel is whole vectors");
constexpr int64_t kPanelRows = 12;                             // whose slabs are read at a time
constexpr int64_t kPanelDepth = 256 / ((kDotPanels + 1) / 2);  // panels of a tile stay in the L1 cache
static_assert(kMlpNeurons % kPanelRows == 0, "no tile of a worker's rows is cut");

// Rows of a tile, so that its accumulators fill the registers.
constexpr int RowsOfTile(int panels) { return kDotPanels > 1 && panels <= 2 ? 12 : kPanelVectors > 2 ? 2 : 6; }

// sums[i * kMlpTokens + t] += w[i] · token t.
template <int kPanels>
void PanelTile(const float* const* w, const float* x, int64_t panel_stride, int64_t depth, float* sums) {
  constexpr int kRows = RowsOfTile(kPanels), kVectors = kPanels * kPanelVectors;
  V sum[kRows][kVectors];
  const float* row[kRows];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
    row[i] = w[i];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Load(sums + i * kMlpTokens + v * kWidth);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V y[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      y[v] = Simd::Load(x + v / kPanelVectors * panel_stride + k * kPanelTokens + v % kPanelVectors * kWidth);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kRows; ++i) {
      const V value = Simd::Set1(row[i][k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Simd::Fma(value, y[v], sum[i][v]);
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) Simd::Store(sums + i * kMlpTokens + v * kWidth, sum[i][v]);
  }
}

// The panels of the tokens and kPanelRows rows; before(n) is called before n products of a row and a panel.
template <int kPanels = kDotPanels, typename Before>
void PanelTiles(int64_t panels, const float* const* w, const float* x, int64_t panel_stride, int64_t depth, float* sums,
                const Before& before) {
  if constexpr (kPanels > 1) {
    if (panels < kPanels) return PanelTiles<kPanels - 1>(panels, w, x, panel_stride, depth, sums, before);
  }
  for (int64_t i = 0; i < kPanelRows; i += RowsOfTile(kPanels)) {
    before(kPanels * RowsOfTile(kPanels));
    PanelTile<kPanels>(w + i, x, panel_stride, depth, sums + i * kMlpTokens);
  }
  if (panels > kPanels) {
    PanelTiles(panels - kPanels, w, x + kPanels * panel_stride, panel_stride, depth, sums + kPanels * kPanelTokens,
               before);
  }
}

// Rows [first, last), at most kPanelRows of them.
class PanelGroup {
 public:
  PanelGroup(const DotProblem& problem, int64_t first, int64_t last)
      : p_(problem), first_(first), count_(last - first) {}

  void Run(float* out, int64_t row_stride, int64_t token_stride) {
    const int64_t size = p_.rows.size, panels = (p_.tokens + kPanelTokens - 1) / kPanelTokens;
    std::fill(sums_, sums_ + kPanelRows * kMlpTokens, 0.0f);
    const float* w[kPanelRows];
    for (int64_t k0 = 0; k0 < size; k0 += kDotDepth) {
      const int64_t depth = std::min(kDotDepth, size - k0);
      for (int64_t i = 0; i < kPanelRows; ++i) {  // rows that are missing repeat the last one
        w[i] = i < count_ ? Slab(i, k0, depth) : w[i - 1];
      }
      PrefetchNext(k0, depth);
      const int64_t products = (depth + kPanelDepth - 1) / kPanelDepth * panels * kPanelRows;
      const auto fetch = [this, products](int64_t n) { ahead_.Fetch(ahead_.lines() * n / products + 1); };
      for (int64_t k = 0; k < depth; k += kPanelDepth) {
        const float* some[kPanelRows];
        for (int64_t i = 0; i < kPanelRows; ++i) some[i] = w[i] + k;
        PanelTiles(panels, some, p_.x_panels + (k0 + k) * kPanelTokens, size * kPanelTokens,
                   std::min(kPanelDepth, depth - k), sums_, fetch);
      }
    }
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t t = 0; t < p_.tokens; ++t) out[i * row_stride + t * token_stride] = sums_[i * kMlpTokens + t];
    }
  }

 private:
  int64_t NeuronOf(int64_t i) const { return p_.neurons != nullptr ? p_.neurons[i] : i; }

  // Values k0 ... of row first_ + i: where they are, if they are fp32.
  const float* Slab(int64_t i, int64_t k0, int64_t depth) {
    const int64_t neuron = NeuronOf(first_ + i);
    if (p_.rows.bits == 0 && p_.rows.dtype == DType::kF32) {
      return reinterpret_cast<const float*>(p_.rows.data + neuron * p_.rows.stride) + k0;
    }
    LoadRow(p_.rows, neuron, k0, depth, slab_ + i * kSlabStride);
    return slab_ + i * kSlabStride;
  }

  // What is loaded next: the rows' next slab, or the first one of the rows behind.
  void PrefetchNext(int64_t k0, int64_t depth) {
    ahead_.Clear();
    const bool is_last = k0 + depth == p_.rows.size;
    const int64_t next = is_last ? 0 : k0 + depth;
    const auto bytes = [this](int64_t k) {
      return p_.rows.bits > 0 ? k * p_.rows.bits / 8 : k * SizeOf(p_.rows.dtype);
    };
    for (int64_t i = first_; i < first_ + count_; ++i) {
      const int64_t row = is_last ? i + kPanelRows : i;
      if (row >= p_.count) break;
      ahead_.Add(p_.rows.data + NeuronOf(row) * p_.rows.stride + bytes(next), 0, 1,
                 bytes(std::min(kDotDepth, p_.rows.size - next)));
    }
  }

  const DotProblem& p_;
  const int64_t first_, count_;
  PrefetchQueue ahead_;
  alignas(64) float sums_[kPanelRows * kMlpTokens];
  alignas(64) float slab_[kPanelRows * kSlabStride];
};

inline bool IsWorthPanels(const DotProblem& problem, int64_t first, int64_t last) {
  if (problem.x_panels == nullptr) return false;
  if (problem.masks == nullptr) return true;
  int64_t pairs = 0;
  for (int64_t i = first; i < last; ++i) pairs += __builtin_popcountll(problem.masks[i]);
  // Dot products of pairs read two values for each that they multiply.
  constexpr int64_t kGain = 4;
  return pairs * kGain > (last - first) * problem.tokens;
}

inline void DotsFp32(const DotProblem& problem, int64_t first, int64_t last, float* out, int64_t row_stride,
                     int64_t token_stride) {
  for (int64_t i = first; i < last; i += kPanelRows) {
    const int64_t end = std::min(last, i + kPanelRows);
    float* const to = out + (i - first) * row_stride;
    if (IsWorthPanels(problem, i, end)) {
      PanelGroup(problem, i, end).Run(to, row_stride, token_stride);
    } else {
      DotRowGroups(problem, i, end, to, row_stride, token_stride);
    }
  }
}

// panel[k, t] = x[t, k], 0 for tokens that are missing.
inline void FillPanel(const float* x, int64_t stride, int64_t tokens, int64_t size, float* panel) {
  for (int64_t k = 0; k < size; ++k) {
    float* const to = panel + k * kPanelTokens;
    for (int64_t t = 0; t < tokens; ++t) to[t] = x[t * stride + k];
    for (int64_t t = tokens; t < kPanelTokens; ++t) to[t] = 0.0f;
  }
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_PANELS_H_
