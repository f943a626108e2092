// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/attention/fp32/shape.cuh"
#include "cuda/attention/relative/band.h"
#include "cuda/attention/relative/expand.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = int64_t{1} << 20;  // then each takes several of its items

// The offset of the row of a table that expanded row i is.
__device__ __forceinline__ int64_t RowOffset(const ExpandParams& p, int64_t head, int64_t i) {
  int64_t row = p.row[max(int64_t{0}, min(p.count - 1, p.first + i))];
  if (p.is_reversed != 0) row = p.rows - 1 - row;
  return head * p.stride_h + row * p.columns;
}

// A warp takes a block of 8 rows.
__global__ void __launch_bounds__(kThreads) ExpandFp32Kernel(const __grid_constant__ ExpandParams p) {
  const int64_t blocks = p.expanded / 8, all = blocks * p.heads;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t step = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t at = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; at < all; at += step) {
    const int64_t head = at / blocks, expanded = at % blocks * 8 + FragmentRow(lane);
    const float* const from = static_cast<const float*>(p.table) + RowOffset(p, head, expanded);
    const auto read = [&](int pair, int i) {
      const int column = 32 * pair + FragmentColumn(lane, i);
      return column < p.D ? from[column] : 0.0f;
    };
    uint32_t largest = 0;
    for (int pair = 0; pair < p.pairs; ++pair) {
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = max(largest, FiniteBits(read(pair, i)));
    }
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = ExponentOf(largest, -100) - kTopExponent;
    const float inverse = PowerOfTwo(-exponent);
    uint4* const to = static_cast<uint4*>(p.to);
    for (int pair = 0; pair < p.pairs; ++pair) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        SplitFp16(read(pair, 2 * i) * inverse, read(pair, 2 * i + 1) * inverse, 1.0f, &high[i], &low[i]);
      }
      to[FragmentIndex(at, 2 * pair, 2 * p.pairs, lane)] = make_uint4(high[0], high[1], high[2], high[3]);
      to[FragmentIndex(at, 2 * pair + 1, 2 * p.pairs, lane)] = make_uint4(low[0], low[1], low[2], low[3]);
    }
    if (lane % 4 != 0) continue;
    p.factor[head * p.expanded + expanded] = PowerOfTwo(exponent);
    p.row_bias[head * p.expanded + expanded] = p.columns > p.D ? from[p.D] : 0.0f;
  }
}

struct PartParams {
  PartProductParams products;
  ExpandParams table;
};

// A CTA takes 32 rows of x and 32 rows of the table, some elements at a time.
constexpr int kTile = 32, kElements = 64;

__global__ void __launch_bounds__(kThreads) PartProductFp32Kernel(const __grid_constant__ PartParams params) {
  const PartProductParams& p = params.products;
  const ExpandParams& table = params.table;
  __shared__ float x[kTile][kElements + 1], rows[kTile][kElements + 1];
  const int row_tiles = (p.N + kTile - 1) / kTile, column_tiles = p.columns / kTile;
  const int64_t items = int64_t{p.B} * p.H * row_tiles * column_tiles;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  constexpr int kWarps = kThreads / 32, kOwn = kTile / kWarps;  // rows of a warp; a lane has a column
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int column0 = static_cast<int>(item % column_tiles) * kTile;
    const int row0 = static_cast<int>(item / column_tiles % row_tiles) * kTile;
    const int64_t bh = item / column_tiles / row_tiles;
    const int b = static_cast<int>(bh / p.H), h = static_cast<int>(bh % p.H);
    const float* const from = static_cast<const float*>(p.x) + b * p.stride.b + h / p.group * p.stride.h;
    const float* const of_table = static_cast<const float*>(table.table);
    const int table_head = table.heads == 1 ? 0 : h;
    float sum[kOwn];
    const float bias =
        table.columns > table.D ? of_table[RowOffset(table, table_head, column0 + lane) + table.D] : 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum[i] = bias;
    for (int d0 = 0; d0 < p.D; d0 += kElements) {
      __syncthreads();
      for (int i = warp; i < kTile; i += kWarps) {
        const int64_t own = RowOffset(table, table_head, column0 + i);
        for (int d = lane; d < kElements; d += 32) {
          const bool is_inside = d0 + d < p.D;
          x[i][d] = is_inside && row0 + i < p.N ? from[(row0 + i) * p.stride.s + d0 + d] : 0.0f;
          rows[i][d] = is_inside ? of_table[own + d0 + d] : 0.0f;
        }
      }
      __syncthreads();
#pragma unroll 4
      for (int d = 0; d < kElements; ++d) {
        const float y = rows[lane][d];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sum[i] = fmaf(x[warp * kOwn + i][d], y, sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int row = row0 + warp * kOwn + i;
      if (row < p.N) p.products[(bh * p.N + row) * p.columns + column0 + lane] = sum[i];
    }
  }
}

template <typename Params, void (*kKernel)(const Params)>
int Launch(const Params& params, int64_t ctas, void* stream) {
  if (ctas == 0) return 0;
  return LaunchKernel<Params, kKernel>(params, static_cast<unsigned>(std::min(ctas, kMostCtas)), kThreads, 0, stream);
}

}  // namespace

int LaunchExpandFp32(const ExpandParams& params, void* stream) {
  const int64_t warps = params.expanded / 8 * params.heads;
  return Launch<ExpandParams, ExpandFp32Kernel>(params, (warps + kThreads / 32 - 1) / (kThreads / 32), stream);
}

int LaunchPartProductsFp32(const PartProductParams& params, const ExpandParams& table, void* stream) {
  const int64_t ctas = int64_t{params.B} * params.H * ((params.N + kTile - 1) / kTile) * (params.columns / kTile);
  return Launch<PartParams, PartProductFp32Kernel>({params, table}, ctas, stream);
}

}  // namespace cuda
}  // namespace stof
