// SPDX-License-Identifier: Apache-2.0
// GEMM by panels of constant weights with factors in bf16, fp32 sums, and the epilogue while sums are in the cache.
#define STOF_BF16_MATMULS
#include <cstring>

#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/packed_bf16.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/bf16.h"
#include "cpu/simd/lanes.h"
#include "cpu/simd/tiles.h"

namespace stof {
namespace cpu {
namespace {

// A tile of sums: rows, columns. Columns of a panel that lie together, pair by pair: all of them, or those of a tile
// register.
#if defined(STOF_TILES)
constexpr int kMostRows = 2 * kSumRows, kPanelColumns = 2 * kSumColumns, kTogether = kSumColumns;
constexpr int kDepthStep = kTileDepth, kRowUnit = kSumRows;
#else
constexpr int kMostRows = Simd::kTileRows, kPanelColumns = Simd::kTileVectors * kWidth, kTogether = kPanelColumns;
constexpr int kDepthStep = 2, kRowUnit = 1;
#endif
constexpr int kVector = kHasTiles ? kTogether : kWidth;
static_assert(kMostRows <= kBf16SumRows && kPanelColumns <= kBf16MostColumns, "sums are in a task's workspace");
static_assert(kBf16DepthUnit % kDepthStep == 0, "workspaces are planned by the larger unit");

inline int64_t PaddedDepth(int64_t K) { return RoundUp(K, kDepthStep); }
// Of a panel with so many columns that count.
inline int64_t PanelWidth(int64_t wide) { return RoundUp(wide, kVector); }

// Elements of a rounded row lie together, or those of 16 rows that a tile register takes at a time.
void RoundRows(const void* a, DType dtype, int64_t K, int64_t count, int64_t rows, uint16_t* to) {
  const auto* const from = static_cast<const char*>(a);
  const int64_t depth = PaddedDepth(K), step = kHasTiles ? kDepthStep : depth;
  for (int64_t m = 0; m < rows; ++m) {
    uint16_t* row = to + m / kRowUnit * kRowUnit * depth + m % kRowUnit * step;
    for (int64_t k = 0; k < depth; k += step, row += kRowUnit * step) {
      const int64_t some = m < count ? Clamp(K - k, 0, step) : 0;
      if (some > 0) ToBf16(from + (m * K + k) * SizeOf(dtype), dtype, some, reinterpret_cast<Bf16*>(row));
      Fill(row + some, row + step, uint16_t{0});
    }
  }
}

void PackBf16Panel(const void* b, DType dtype, int64_t stride, int64_t K, int64_t wide, uint16_t* panel) {
  const int64_t depth = PaddedDepth(K), width = PanelWidth(wide);
  Bf16 row[kPanelColumns];
  Fill(row + wide, row + width, Bf16{0});
  const auto at = [&](int64_t k, int64_t n) {
    const int64_t together = kHasTiles ? kTogether : width;
    return n / together * together * depth + (k / 2 * together + n % together) * 2 + k % 2;
  };
  for (int64_t k = 0; k < depth; ++k) {
    if (k < K) {
      ToBf16(static_cast<const char*>(b) + k * stride * SizeOf(dtype), dtype, wide, row);
    } else {
      Fill(row, row + width, Bf16{0});
    }
    for (int64_t n = 0; n < width; ++n) panel[at(k, n)] = row[n];
  }
}

// The panel to prefetch, `step` bytes with each step of k. Addresses beyond the panels do no harm. Tile registers use
// it: they take a panel faster than the hardware fetches one.
struct NextPanel {
  const char* at;
  int64_t step;
};

#if defined(STOF_TILES)
// c[16 kRows, 16 kBlock], rows kPanelColumns apart, = a · panel.
template <int kRows, int kBlock>
void SumTile(const Bf16* a, int64_t depth, const Bf16* panel, float* c, NextPanel next) {
  STOF_STORE_FOR_TILES();
  ZeroSumTiles<4>();
  for (int64_t k = 0; k < depth; k += kTileDepth) {
    for (int64_t i = 0; i < next.step; i += 64) __builtin_prefetch(next.at + i, 0, 2);
    next.at += next.step;
    AddTileGrid<kRows, kBlock>(a + k * kSumRows, 2 * kSumRows * depth, panel + k * kSumColumns,
                               2 * kSumColumns * depth);
  }
  StoreTileGrid<kRows, kBlock>(c, 4 * kPanelColumns);
}

inline void Sums(int64_t rows, int64_t width, const Bf16* a, int64_t depth, const Bf16* panel, float* c,
                 NextPanel next) {
  const bool has_two = width > kSumColumns;
  if (rows > kSumRows) {
    has_two ? SumTile<2, 2>(a, depth, panel, c, next) : SumTile<2, 1>(a, depth, panel, c, next);
  } else {
    has_two ? SumTile<1, 2>(a, depth, panel, c, next) : SumTile<1, 1>(a, depth, panel, c, next);
  }
}
#else
inline __m512bh PairsAt(const Bf16* at) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(at)); }
inline __m512bh PairAt(const Bf16* at) {
  int32_t pair;
  std::memcpy(&pair, at, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
}

// c[kRows, kVectors vectors], rows kPanelColumns apart, = a · panel.
template <int kRows, int kVectors>
void SumTile(const Bf16* a, int64_t depth, const Bf16* panel, float* c) {
  V sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Simd::Set1(0.0f);
  }
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kVectors * kWidth) {
    __m512bh x[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) x[j] = PairsAt(panel + 2 * j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512bh y = PairAt(a + i * depth + k);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], y, x[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) Simd::Store(c + i * kPanelColumns + j * kWidth, sum[i][j]);
  }
}

using SumFunction = void (*)(const Bf16* a, int64_t depth, const Bf16* panel, float* c);
template <int kRows>
struct SumTiles {
  static SumFunction Of(int64_t rows, int64_t width) {
    if (rows < kRows) return SumTiles<kRows - 1>::Of(rows, width);
    static_assert(Simd::kTileVectors == 3);
    return width > 2 * kWidth ? SumTile<kRows, 3> : width > kWidth ? SumTile<kRows, 2> : SumTile<kRows, 1>;
  }
};
template <>
struct SumTiles<0> {
  static SumFunction Of(int64_t, int64_t) { return nullptr; }
};

inline void Sums(int64_t rows, int64_t width, const Bf16* a, int64_t depth, const Bf16* panel, float* c,
                 NextPanel /*next*/) {
  SumTiles<kMostRows>::Of(rows, width)(a, depth, panel, c);
}
#endif

// Applies an epilogue in fp16 or bf16 to blocks of one panel: in fp32, and rounded once.
class NarrowPanel {
 public:
  // For columns [n0, n0 + columns) of an output [M, N].
  NarrowPanel(const CpuNarrowOperands& operands, int64_t n0, int64_t columns, int64_t N)
      : operands_(operands),
        n0_(n0),
        columns_(columns),
        N_(N),
        // All members are given: a default constructor would be one symbol of many instruction sets.
        fp32_epilogue_{operands.epilogue->activation,
                       ReadColumns(operands.epilogue->bias0, vectors_[0]),
                       ReadColumns(operands.epilogue->bias1, vectors_[1]),
                       ReadColumns(operands.epilogue->scale, vectors_[2]),
                       operands.epilogue->row != nullptr ? row_ : nullptr,
                       operands.epilogue->residual != nullptr ? residual_ : nullptr} {}

  // Rows m0 to m0 + rows; sums are kPanelColumns apart.
  void Apply(int64_t m0, int64_t rows, const float* first, const float* second) {
    const auto& e = *operands_.epilogue;
    if (e.row != nullptr) ToFloats(e.row + m0, operands_.dtype, rows, row_);
    for (int64_t i = 0; i < rows && e.residual != nullptr; ++i) {
      ToFloats(e.residual + (m0 + i) * N_ + n0_, operands_.dtype, columns_, residual_ + i * kPanelColumns);
    }
    const EpilogueBlock block = {first, second, kPanelColumns, kPanelColumns, output_};
    ApplyEpilogue(fp32_epilogue_, block, 0, 0, rows, columns_, kPanelColumns);
    for (int64_t i = 0; i < rows; ++i) {
      FromFloats(output_ + i * kPanelColumns, operands_.dtype, columns_, operands_.output + (m0 + i) * N_ + n0_);
    }
  }

 private:
  // This panel's columns of a vector [N] in fp32; nullptr where it is absent.
  const float* ReadColumns(const uint16_t* from, float* to) const {
    if (from == nullptr) return nullptr;
    ToFloats(from + n0_, operands_.dtype, columns_, to);
    return to;
  }

  const CpuNarrowOperands& operands_;
  const int64_t n0_, columns_, N_;
  float vectors_[3][kPanelColumns];
  float row_[kMostRows];
  float residual_[kMostRows * kPanelColumns];
  float output_[kMostRows * kPanelColumns];
  const CpuGemmEpilogue fp32_epilogue_;
};

// finish(row, count, first, second): what is done with the sums of `count` rows from this row of the output on, while
// they are in the cache. second: nullptr where there is one matmul.
template <typename Finish>
void SumPanel(const PackedGemmBf16Problem& p, int64_t m0, int64_t rows, int64_t panel, float* workspace,
              const Finish& finish) {
  const ConfiguredTiles tiles(kWholeDepthBytes);
  const int64_t depth = PaddedDepth(p.K), width = PanelWidth(Min(kPanelColumns, p.N - panel * kPanelColumns));
  const auto* const panels = reinterpret_cast<const Bf16*>(p.panels + panel * p.products * depth * kPanelColumns);
  const auto* a = reinterpret_cast<const Bf16*>(p.rounded) + m0 * depth;
  // Few tiles leave no time for a prefetch, and the hardware prefetches what is read in order.
  const int64_t row_tiles = (rows + kMostRows - 1) / kMostRows;
  const int64_t step = row_tiles < 4 ? 0 : RoundUp((kDepthStep * width * 2 + row_tiles - 1) / row_tiles, 64);
  const auto* next = reinterpret_cast<const char*>(panels + p.products * depth * width);
  float* const c[2] = {workspace, workspace + kMostRows * kPanelColumns};
  for (int64_t m = 0; m < rows;) {
    // As many rows in each of the last tiles, give or take one; tile registers have theirs whole.
    const int64_t rest = (rows - m + kMostRows - 1) / kMostRows;
    const int64_t count = kHasTiles ? Min(kMostRows, rows - m) : (rows - m) / rest;
    for (int64_t i = 0; i < p.products; ++i) {
      Sums(count, width, a, depth, panels + i * depth * width, c[i], {next, step});
      next += step * (depth / kDepthStep);
    }
    finish(p.first + m0 + m, count, c[0], p.products > 1 ? c[1] : nullptr);
    m += count, a += count * depth;
  }
}

void RunBf16Panel(const PackedGemmBf16Problem& p, int64_t m0, int64_t rows, int64_t panel, float* workspace) {
  const CpuPackedGemmArgs& args = *p.args;
  const int64_t n0 = panel * kPanelColumns, columns = Min(kPanelColumns, p.N - n0);
  if (args.narrow.epilogue != nullptr) {
    NarrowPanel narrow(args.narrow, n0, columns, p.N);
    const auto finish = [&](int64_t row, int64_t count, const float* first, const float* second) {
      narrow.Apply(row, count, first, second);
    };
    return SumPanel(p, m0, rows, panel, workspace, finish);
  }
  const auto finish = [&](int64_t row, int64_t count, const float* first, const float* second) {
    if (args.epilogue != nullptr) {
      const EpilogueBlock block = {first, second, kPanelColumns, kPanelColumns, args.output[0] + row * p.N + n0};
      return ApplyEpilogue(*args.epilogue, block, row, n0, count, columns, p.N);
    }
    const float* const sums[2] = {first, second};
    for (int64_t i = 0; i < p.products; ++i) {
      for (int64_t r = 0; r < count; ++r) {
        std::memcpy(args.output[i] + (row + r) * p.N + n0, sums[i] + r * kPanelColumns,
                    static_cast<size_t>(columns) * 4);
      }
    }
  };
  SumPanel(p, m0, rows, panel, workspace, finish);
}

}  // namespace

STOF_EXPORT_KERNELS(PackedGemmBf16Kernels, packed_gemm_bf16) = {kPanelColumns, kVector,   kRowUnit,    kDepthStep,
                                                                PackBf16Panel, RoundRows, RunBf16Panel};

}  // namespace cpu
}  // namespace stof
