// SPDX-License-Identifier: Apache-2.0
// Tiles of bf16 matmuls with fp32 sums: c += a · panels.
//
// Gate and up: a has weight rows, panels have tokens. Down: a has tokens, panels have 16 columns of down rows. A panel
// interleaves two steps of the depth, as vdpbf16ps and AMX read them.
#ifndef STOF_CPU_SPARSE_MLP_BF16_TILES_H_
#define STOF_CPU_SPARSE_MLP_BF16_TILES_H_

#include <cstdint>
#include <cstring>

#include "cpu/simd/algorithms.h"
#include "cpu/simd/bf16.h"
#include "cpu/simd/simd.h"
#include "cpu/simd/tiles.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kPanelWidth = 16;     // columns
constexpr int64_t kPrefetchPairs = 16;  // pairs of the depth between two calls of `prefetch`: 64 bytes of a row

// a: rows `a_stride` elements apart. panels: [depth / 2, 16, 2] each, `panel_stride` elements apart. c: rows `c_stride`
// apart. depth is a multiple of 2 kPrefetchPairs.
struct Bf16Factors {
  const Bf16* a;
  int64_t a_stride;
  const Bf16* panels;
  int64_t panel_stride, depth;
  float* c;
  int64_t c_stride;
};

#if defined(STOF_TILES)
constexpr int64_t kRowUnit = kSumRows;
constexpr int kMostTileRows = 2 * kSumRows, kMostTilePanels = 2;
static_assert(kSumColumns == kPanelWidth && kTileDepth == 2 * kPrefetchPairs);

template <int kRows, int kPanels, typename Prefetch>
void AddTileOf(const Bf16Factors& f, const Prefetch& prefetch) {
  STOF_STORE_FOR_TILES();
  LoadTileGrid<kRows, kPanels>(f.c, 4 * f.c_stride);
  for (int64_t k = 0; k < f.depth; k += kTileDepth) {
    prefetch(k / 2);
    AddTileGrid<kRows, kPanels>(f.a + k, 2 * kSumRows * f.a_stride, f.panels + k * kPanelWidth, 2 * f.panel_stride,
                                2 * f.a_stride);
  }
  StoreTileGrid<kRows, kPanels>(f.c, 4 * f.c_stride);
}

// c[rows, 16 panels] += a · panels, at most kMostTileRows and kMostTilePanels. prefetch(pair) is called along the way.
// Rows are computed up to a multiple of kRowUnit.
template <typename Prefetch>
void AddBf16Tile(const Bf16Factors& f, int64_t rows, int64_t panels, const Prefetch& prefetch) {
  if (rows > kSumRows) {
    panels > 1 ? AddTileOf<2, 2>(f, prefetch) : AddTileOf<2, 1>(f, prefetch);
  } else {
    panels > 1 ? AddTileOf<1, 2>(f, prefetch) : AddTileOf<1, 1>(f, prefetch);
  }
}
#else
constexpr int64_t kRowUnit = 1;
// 12 × 2 sums, 2 operands and a broadcast: 27 of 32 registers.
constexpr int kMostTileRows = 12, kMostTilePanels = 2;

template <int kRows, int kPanels, typename Prefetch>
void AddTileOf(const Bf16Factors& f, const Prefetch& prefetch) {
  __m512 sum[kRows][kPanels];
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kPanels; ++j) sum[i][j] = _mm512_loadu_ps(f.c + i * f.c_stride + j * kPanelWidth);
  }
  const int64_t pairs = f.depth / 2;
  for (int64_t k0 = 0; k0 < pairs; k0 += kPrefetchPairs) {
    prefetch(k0);
    for (int64_t k = k0; k < k0 + kPrefetchPairs; ++k) {
      __m512bh x[kPanels];
#pragma GCC unroll 2
      for (int j = 0; j < kPanels; ++j) {
        x[j] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(f.panels + j * f.panel_stride + k * 2 * kPanelWidth));
      }
#pragma GCC unroll 12
      for (int i = 0; i < kRows; ++i) {
        int32_t pair;
        std::memcpy(&pair, f.a + i * f.a_stride + 2 * k, 4);
        const __m512bh y = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
#pragma GCC unroll 2
        for (int j = 0; j < kPanels; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], y, x[j]);
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int j = 0; j < kPanels; ++j) _mm512_storeu_ps(f.c + i * f.c_stride + j * kPanelWidth, sum[i][j]);
  }
}

// c[rows, 16 panels] += a · panels, at most kMostTileRows and kMostTilePanels. prefetch(pair) is called along the way.
template <int kRows = kMostTileRows, typename Prefetch>
void AddBf16Tile(const Bf16Factors& f, int64_t rows, int64_t panels, const Prefetch& prefetch) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return AddBf16Tile<kRows - 1>(f, rows, panels, prefetch);
  }
  panels > 1 ? AddTileOf<kRows, 2>(f, prefetch) : AddTileOf<kRows, 1>(f, prefetch);
}
#endif

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_BF16_TILES_H_
