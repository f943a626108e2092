// SPDX-License-Identifier: Apache-2.0
// The work of the kernels of expand.cu.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_EXPAND_CUH_
#define STOF_CUDA_ATTENTION_RELATIVE_EXPAND_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/relative/band.h"
#include "cuda/attention/relative/expand.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

// Of a head: each has 8 elements.
STOF_HD constexpr int CountFragments(const ExpandParams& p) { return static_cast<int>(p.expanded) / 8 * p.pairs * 32; }

// Writes 8 elements of the expanded rows of a head.
template <typename T>
__device__ __forceinline__ void ExpandFragment(const ExpandParams& p, int64_t head, int fragment) {
  const int lane = fragment % 32, pair = fragment / 32 % p.pairs;
  const int64_t block = fragment / 32 / p.pairs;
  const auto offset_of = [&](int64_t expanded) {
    int64_t row = p.row[max(int64_t{0}, min(p.count - 1, p.first + expanded))];
    if (p.is_reversed != 0) row = p.rows - 1 - row;
    return head * p.stride_h + row * p.columns;
  };
  const auto read = [&](int64_t i) {
    return p.is_float != 0 ? static_cast<const float*>(p.table)[i] : ToFloat(static_cast<const T*>(p.table)[i]);
  };
  const bool is_left = p.is_left_operand != 0;
  // Of words 0 and 2, and of words 1 and 3.
  const int64_t own = 8 * block + FragmentRow(lane), left = block / 2 * 16 + LeftFragmentRow(lane, 0);
  const int64_t even = offset_of(is_left ? left : own), odd = is_left ? offset_of(left + 8) : even;
  const int step = static_cast<int>(block % 2) * p.pairs + pair;
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t from = i % 2 == 0 ? even : odd;
    const int column = is_left ? 16 * step + LeftFragmentColumn(lane, 2 * i) : 32 * pair + FragmentColumn(lane, 2 * i);
    words[i] = column < p.D ? Pack<T>(read(from + column), read(from + column + 1)) : 0;  // D is a multiple of 8
  }
  reinterpret_cast<uint4*>(p.to)[head * CountFragments(p) + fragment] =
      make_uint4(words[0], words[1], words[2], words[3]);
  if (p.row_bias == nullptr || pair != 0 || lane % 4 != 0) return;
  p.row_bias[head * p.expanded + own] = p.columns > p.D ? read(offset_of(own) + p.D) : 0.0f;
}

// The products of rows [row0, row0 + 16) of a head of x and all expanded rows, by a warp.
template <typename T>
__device__ __forceinline__ void MultiplyPartRows(const PartProductParams& p, int64_t bh, int row0, int lane) {
  const int b = static_cast<int>(bh / p.H), h = static_cast<int>(bh % p.H);
  const int row = row0 + lane / 4;  // and row + 8
  const T* const x = static_cast<const T*>(p.x) + b * p.stride.b + h / p.group * p.stride.h;
  // Two elements of a row; 0 beyond the tensor.
  const auto read = [&](int of, int column) -> uint32_t {
    if (of >= p.N || column >= p.D) return 0;
    return *reinterpret_cast<const uint32_t*>(x + of * p.stride.s + column);
  };
  const uint4* const rows =
      reinterpret_cast<const uint4*>(static_cast<const char*>(p.rows) + h * p.row_stride_h) + lane;
  const float* const bias = p.row_bias + h * p.row_bias_stride_h + 2 * (lane % 4);
  float* const to = p.products + bh * p.N * p.columns + 2 * (lane % 4);
  for (int first = 0; first < p.columns; first += 32) {
    float c[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      c[n][0] = c[n][2] = bias[first + 8 * n];
      c[n][1] = c[n][3] = bias[first + 8 * n + 1];
    }
    for (int k = 0; k < p.pairs; ++k) {
      uint32_t a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 32 * k + 16 * half + 2 * (lane % 4);
        a[half][0] = read(row, column), a[half][1] = read(row + 8, column);
        a[half][2] = read(row, column + 8), a[half][3] = read(row + 8, column + 8);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint4 b = rows[FragmentIndex(first / 8 + n, k, p.pairs, 0)];
        Mma<T>(c[n], a[0], b.x, b.y);
        Mma<T>(c[n], a[1], b.z, b.w);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= p.N) continue;
      float* const own = to + (row + 8 * r) * int64_t{p.columns} + first;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        *reinterpret_cast<float2*>(own + 8 * n) = make_float2(c[n][2 * r], c[n][2 * r + 1]);
      }
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_EXPAND_CUH_
