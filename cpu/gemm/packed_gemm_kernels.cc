// SPDX-License-Identifier: Apache-2.0
// GEMM by panels of constant weights, with the epilogue while the block is in the cache.
#include <cstring>

#include "cpu/gemm/epilogue.h"
#include "cpu/gemm/packed.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/lanes.h"

namespace stof {
namespace cpu {
namespace {

constexpr int kTileRows = Simd::kTileRows;
constexpr int kTileVectors = Simd::kTileVectors;
constexpr int kTileColumns = kTileVectors * kWidth;
static_assert(kTileColumns <= kPackedMostColumns, "a block of a product is in a worker's workspace");

// The panel to prefetch, `step` bytes for each step of k: weights are read from memory once. Addresses beyond the
// panels do no harm.
struct NextPanel {
  const char* at;
  int64_t step;
};

// A matrix that is added before a tile leaves the registers: rows `stride` apart, 0 for one row.
struct Addend {
  const float* at = nullptr;
  int64_t stride = 0;
  Addend Rows(int64_t rows) const { return {at == nullptr ? nullptr : at + rows * stride, stride}; }
};
struct Addends {
  Addend before, bias, residual;  // in the order of addition; before: the partial sums of earlier slabs of K
  Addends Rows(int64_t rows) const { return {before.Rows(rows), bias.Rows(rows), residual.Rows(rows)}; }
};

// c = a · b and addends. a: rows `lda` apart, read where they are; b: rows of kVectors vectors. One loop over k, not
// unrolled, and sums that begin as zeros: anything else makes compilers move accumulators through memory.
template <int kRows, int kVectors>
void PackedTile(const float* a, int64_t lda, const float* b, int64_t depth, float* c, int64_t ldc, const Addends& plus,
                NextPanel next) {
  // Rows far apart, which the hardware does not prefetch.
  if (plus.residual.at != nullptr) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) __builtin_prefetch(plus.residual.at + i * plus.residual.stride + j * kWidth);
    }
  }
  V sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Simd::Set1(0.0f);
  }
  int64_t k = 0;
#if defined(STOF_NEON)
  for (; k + 4 <= depth; k += 4, b += 4 * kVectors * kWidth) {
    __builtin_prefetch(next.at, 0, 2);
    next.at += 4 * next.step;
    AddFourSteps([&](int i) { return Simd::Load(a + i * lda + k); },
                 [&](int step, int j) { return Simd::Load(b + (step * kVectors + j) * kWidth); }, sum);
  }
#endif
  for (; k < depth; ++k) {
    __builtin_prefetch(next.at, 0, 2);
    next.at += next.step;
    V x[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) x[j] = Simd::Load(b + j * kWidth);
    b += kVectors * kWidth;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const V y = Simd::Set1(a[i * lda + k]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Simd::Fma(y, x[j], sum[i][j]);
    }
  }
  const Addend addends[] = {plus.before, plus.bias, plus.residual};
  for (const Addend& addend : addends) {
    if (addend.at == nullptr) continue;
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) {
        sum[i][j] = Simd::Add(sum[i][j], Simd::Load(addend.at + i * addend.stride + j * kWidth));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) Simd::Store(c + i * ldc + j * kWidth, sum[i][j]);
  }
}

using TileFunction = void (*)(const float* a, int64_t lda, const float* b, int64_t depth, float* c, int64_t ldc,
                              const Addends& plus, NextPanel next);
template <int kRows, int kVectors>
struct Tiles {
  static TileFunction Of(int64_t rows, int64_t vectors) {
    if (vectors < kVectors) return Tiles<kRows, (kVectors > 1 ? kVectors - 1 : 1)>::Of(rows, vectors);
    return rows == kRows ? PackedTile<kRows, kVectors> : Tiles<kRows - 1, kVectors>::Of(rows, vectors);
  }
};
template <int kVectors>
struct Tiles<0, kVectors> {
  static TileFunction Of(int64_t, int64_t) { return nullptr; }
};

// c[rows, width] = a · panel and addends.
inline void PackedProduct(const float* a, int64_t K, const float* panel, int64_t width, int64_t rows, float* c,
                          int64_t ldc, const Addends& plus) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t slabs = Max(1, (K + kPackedDepth - 1) / kPackedDepth);
  const int64_t most = ((K + slabs - 1) / slabs + 3) / 4 * 4;
  int64_t k0 = 0;
  do {
    const int64_t depth = Min(most, K - k0);
    Addends addends = k0 + depth < K ? Addends() : plus;
    if (k0 > 0) addends.before = {c, ldc};
    const float* const b = panel + k0 * width;
    const auto* next = reinterpret_cast<const char*>(b + depth * width);
    // Few tiles leave no time for a prefetch, and the hardware prefetches what is read in order.
    const int64_t step = tiles >= 4 ? (width * 4 + tiles - 1) / tiles : 0;
    for (int64_t t = 0, m = 0; t < tiles; ++t) {
      const int64_t count = (rows - m) / (tiles - t);  // as many rows in each tile, give or take one
      Tiles<kTileRows, kTileVectors>::Of(count, width / kWidth)(a + m * K + k0, K, b, depth, c + m * ldc, ldc,
                                                                addends.Rows(m), {next, step});
      next += step * depth;
      m += count;
    }
    k0 += depth;
  } while (k0 < K);
}

// Of a panel with so many columns that count, in whole vectors.
inline int64_t PackedWidth(int64_t wide) { return RoundUp(wide, kWidth); }

// The addends of an epilogue that only adds.
inline Addends SelectAddends(const CpuGemmEpilogue& e, int64_t m0, int64_t n0, int64_t N) {
  Addends plus;
  if (e.bias0 != nullptr) plus.bias = {e.bias0 + n0, 0};
  if (e.residual != nullptr) plus.residual = {e.residual + m0 * N + n0, N};
  return plus;
}

void RunPanel(const PackedGemmProblem& p, int64_t m0, int64_t panel, float* workspace) {
  const CpuPackedGemmArgs& args = *p.args;
  const int64_t rows = Min(p.block, args.M - m0), n0 = panel * kTileColumns;
  const int64_t wide = Min(kTileColumns, p.N - n0), width = PackedWidth(wide);
  const float* const panels = p.panels + panel * p.products * p.K * kTileColumns;
  const CpuGemmEpilogue* const e = args.epilogue;
  const bool adds = e != nullptr && p.products == 1 && wide == width && e->activation == Activation::kNone &&
                    e->scale == nullptr && e->row == nullptr;
  const Addends plus = adds ? SelectAddends(*e, m0, n0, p.N) : Addends();
  float* c[2] = {};
  int64_t stride[2] = {};
  for (int64_t i = 0; i < p.products; ++i) {
    const bool own = wide < width || (e != nullptr && i == 1);
    c[i] = own ? workspace + i * kPackedRows * kTileColumns : args.output[i] + m0 * p.N + n0;
    stride[i] = own ? kTileColumns : p.N;
    PackedProduct(args.a + m0 * p.K, p.K, panels + i * p.K * width, width, rows, c[i], stride[i], plus);
  }
  if (adds) return;
  if (e == nullptr) {
    for (int64_t i = 0; i < p.products && wide < width; ++i) {
      for (int64_t m = 0; m < rows; ++m) {
        std::memcpy(args.output[i] + (m0 + m) * p.N + n0, c[i] + m * kTileColumns, static_cast<size_t>(wide) * 4);
      }
    }
    return;
  }
  const EpilogueBlock block = {c[0], c[1], stride[0], stride[1], args.output[0] + m0 * p.N + n0};
  ApplyEpilogue(*e, block, m0, n0, rows, wide, p.N);
}

void PackPanel(const float* b, int64_t stride, int64_t K, int64_t wide, float* panel) {
  const int64_t width = PackedWidth(wide);
  for (int64_t k = 0; k < K; ++k) {
    std::memcpy(panel + k * width, b + k * stride, static_cast<size_t>(wide) * 4);
    Fill(panel + k * width + wide, panel + (k + 1) * width, 0.0f);
  }
}

}  // namespace

STOF_EXPORT_KERNELS(PackedGemmKernels, packed_gemm) = {kTileColumns, kWidth, kTileRows, PackPanel, RunPanel};

}  // namespace cpu
}  // namespace stof
