// SPDX-License-Identifier: Apache-2.0
// A block of a GEMM in fp32.
#include <cstring>

#include "cpu/gemm/gemm.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/lanes.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

constexpr int kGemmRows = 6;  // of a tile in registers
constexpr int kGemmColumns = Simd::kVectors * kWidth;

// to[kGemmRows, kGemmColumns] = a · b; a: columns of kGemmRows elements, b: rows of kGemmColumns.
inline void GemmTile(const float* a, const float* b, int64_t depth, float* to) {
  constexpr int kVectors = Simd::kVectors;
  V sum[kGemmRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kGemmRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) sum[i][j] = Simd::Set1(0.0f);
  }
  for (int64_t k = 0; k < depth; ++k) {
    V x[kVectors];
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) x[j] = Simd::Load(b + k * kGemmColumns + j * kWidth);
#if defined(STOF_NEON)
    AddStep(a + k * kGemmRows, x, sum);
#else
#pragma GCC unroll 8
    for (int i = 0; i < kGemmRows; ++i) {
      const V y = Simd::Set1(a[k * kGemmRows + i]);
#pragma GCC unroll 8
      for (int j = 0; j < kVectors; ++j) sum[i][j] = Simd::Fma(y, x[j], sum[i][j]);
    }
#endif
  }
#pragma GCC unroll 8
  for (int i = 0; i < kGemmRows; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) Simd::Store(to + i * kGemmColumns + j * kWidth, sum[i][j]);
  }
}

void GemmBlock(const CpuGemmArgs& p, int64_t m0, int64_t n0, float* workspace) {
  const int64_t rows = Min(kGemmBlockRows, p.M - m0), columns = Min(kGemmBlockColumns, p.N - n0);
  const int64_t size = SizeOf(p.dtype);
  float* const a = workspace;
  float* const b = a + kGemmBlockRows * kGemmDepth;
  float* const line = b + kGemmBlockColumns * kGemmDepth;
  float* const tile = line + Max(kGemmDepth, kGemmBlockColumns);
  for (int64_t k0 = 0; k0 == 0 || k0 < p.K; k0 += kGemmDepth) {
    const int64_t depth = Min(kGemmDepth, p.K - k0);
    for (int64_t i = 0; i < RoundUp(rows, kGemmRows); ++i) {
      if (i < rows && depth > 0) {
        ToFloats(static_cast<const char*>(p.a) + ((m0 + i) * p.K + k0) * size, p.dtype, depth, line);
      } else {
        Fill(line, line + depth, 0.0f);
      }
      float* const to = a + i / kGemmRows * kGemmRows * depth + i % kGemmRows;
      for (int64_t k = 0; k < depth; ++k) to[k * kGemmRows] = line[k];
    }
    const int64_t panels = (columns + kGemmColumns - 1) / kGemmColumns;
    Fill(line, line + kGemmBlockColumns, 0.0f);
    for (int64_t k = 0; k < depth; ++k) {
      ToFloats(static_cast<const char*>(p.b) + ((k0 + k) * p.stride + n0) * size, p.dtype, columns, line);
      for (int64_t j = 0; j < panels; ++j) {
        std::memcpy(b + (j * depth + k) * kGemmColumns, line + j * kGemmColumns, kGemmColumns * sizeof(float));
      }
    }
    for (int64_t j = 0; j < panels; ++j) {
      const int64_t n = j * kGemmColumns, wide = Min(kGemmColumns, columns - n);
      for (int64_t i = 0; i < rows; i += kGemmRows) {
        GemmTile(a + i * depth, b + n * depth, depth, tile);
        for (int64_t r = 0; r < Min(kGemmRows, rows - i); ++r) {
          float* const to = p.output + (m0 + i + r) * p.N + n0 + n;
          const float* const from = tile + r * kGemmColumns;
          for (int64_t c = 0; c < wide; ++c) to[c] = k0 == 0 ? from[c] : to[c] + from[c];
        }
      }
    }
  }
}

}  // namespace

STOF_EXPORT_KERNELS(GemmKernels, gemm) = {GemmBlock};

}  // namespace cpu
}  // namespace stof
