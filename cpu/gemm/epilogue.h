// SPDX-License-Identifier: Apache-2.0
// The epilogue of GEMMs by constant weights, applied to sums that are in the cache.
#ifndef STOF_CPU_GEMM_EPILOGUE_H_
#define STOF_CPU_GEMM_EPILOGUE_H_

#include <cstdint>

#include "cpu/simd/activation.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/lanes.h"
#include "plugins/core/contract/gemm.h"

namespace stof {
namespace cpu {
namespace {

// Sums of a block of rows and columns, and where its results go.
struct EpilogueBlock {
  const float *first, *second;
  int64_t first_stride, second_stride;
  float* to;  // rows N apart
};

template <typename Function>
void ApplyEpilogueOf(const CpuGemmEpilogue& e, const EpilogueBlock& block, int64_t m0, int64_t n0, int64_t rows,
                     int64_t wide, int64_t N) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* const residual = e.residual != nullptr ? e.residual + (m0 + i) * N + n0 : nullptr;
    const V row = e.row != nullptr ? Set(e.row[m0 + i]) : V{};
    for (int64_t n = 0; n < wide; n += kWidth) {
      const int some = static_cast<int>(Min(kWidth, wide - n));
      const auto load = [some](const float* from) {
        return some == kWidth ? Simd::Load(from) : Simd::LoadSome(from, some);
      };
      V y = Simd::Load(block.first + i * block.first_stride + n);
      if (e.bias0 != nullptr) y = y + load(e.bias0 + n0 + n);
      y = Function::Of(y);
      if (block.second != nullptr) {
        V other = Simd::Load(block.second + i * block.second_stride + n);
        if (e.bias1 != nullptr) other = other + load(e.bias1 + n0 + n);
        y = y * other;
      }
      if (e.scale != nullptr) y = y * load(e.scale + n0 + n);
      if (e.row != nullptr) y = y * row;
      if (residual != nullptr) y = y + load(residual + n);
      float* const to = block.to + i * N + n;
      if (some == kWidth) {
        Simd::Store(to, y);
      } else {
        Simd::StoreSome(to, y, some);
      }
    }
  }
}

// The block begins with row m0 and column n0 of an output with N columns.
inline void ApplyEpilogue(const CpuGemmEpilogue& e, const EpilogueBlock& block, int64_t m0, int64_t n0, int64_t rows,
                          int64_t wide, int64_t N) {
  WithActivation(e.activation,
                 [&](auto function) { ApplyEpilogueOf<decltype(function)>(e, block, m0, n0, rows, wide, N); });
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_GEMM_EPILOGUE_H_
