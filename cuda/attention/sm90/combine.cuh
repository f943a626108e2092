// SPDX-License-Identifier: Apache-2.0
// Helpers of the epilogue, and the combine kernel of split rows: it scales the outputs of each split to the row max of
// all and adds them up, as split-KV decoding does.
#ifndef STOF_CUDA_ATTENTION_SM90_COMBINE_CUH_
#define STOF_CUDA_ATTENTION_SM90_COMBINE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/far_scores.cuh"
#include "cuda/attention/lse.cuh"
#include "cuda/attention/sm90/api.h"
#include "cuda/attention/sm90/config.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm90.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// The weight of the sink in the row sum, relative to the row max.
template <typename T>
__device__ __forceinline__ float SinkWeight(const AttentionParams& p, int h, float row_max) {
  if (p.sink == nullptr) return 0.0f;
  const float logit =
      p.sink_is_float != 0 ? static_cast<const float*>(p.sink)[h] : ToFloat(static_cast<const T*>(p.sink)[h]);
  return Exp2(fminf(ScoreDifference(logit * kLog2E, row_max), 127.0f));
}

__device__ __forceinline__ void FlagEmptyRow(const Sm90Params& params, int b, int h, int row) {
  const AttentionParams& p = params.attention;
  if (row >= p.S || params.empty_flags == nullptr) return;
  params.empty_flags[(b * p.H + h) * ((p.S + 63) / 64) + row / 64] = 1;
}

constexpr int kCombineColumns = 16;  // columns of a CTA: a warp has eight of them, for 32 rows

// A CTA combines 16 columns of 64 rows. A split stores the outputs of four neighbouring threads together, which are
// four columns of a row; a thread here has eight columns of a row. The splits of a row are added up in their order.
// Longer than 80 lines: outputs are in flight, in registers, while row max and row sum are computed.
template <typename T, int kHead>
__global__ void __launch_bounds__(kWarpgroup) CombineKernel(const __grid_constant__ Sm90Params params) {
  static_assert(kHead % kCombineColumns == 0, "CTAs have all columns between them");
  constexpr int kAhead = 8;  // splits whose outputs are in flight together
  __shared__ float scales[kMostSplitsOfRow][64];
  __shared__ float row_maxes[2][64], sums[2][64];
  LetNextStart();
  const AttentionParams& p = params.attention;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int slice = static_cast<int>(blockIdx.x) % (kHead / kCombineColumns);
  const SplitRow split_row =
      params.split_rows[blockIdx.x /
                        (kHead / kCombineColumns)];  // the schedule was uploaded before the previous kernel began
  const int rows = (p.S + 63) / 64, bh = split_row.index / rows, b = bh / p.H, h = bh % p.H;
  const int block = 2 * slice + warp / 2, below = warp % 2;  // 8 columns; the rows of a thread or those 8 below
  WaitForPrevious();
  const float4* const from = reinterpret_cast<const float4*>(params.split_output) +
                             (static_cast<int64_t>(split_row.first) * (kHead / 2) + 4 * block + 2 * below) * 32 + lane;
  float4 in_flight[kAhead][2];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= split_row.count) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) in_flight[u][e] = from[((first + u) * (kHead / 2) + e) * 32];
    }
  };
  fetch(0);
  // Row max and row sum: half of the threads read the even splits of the 64 rows, half the odd ones.
  constexpr int kOwn = static_cast<int>(kMostSplitsOfRow) / 2;
  const int half = thread / 64, of_half = thread % 64;
  float2 own[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int part = 2 * i + half;
    own[i] = make_float2(-INFINITY, 0.0f);
    if (part < split_row.count) own[i] = params.split_stats[(split_row.first + part) * 64 + of_half];
  }
  float most = own[0].x;
#pragma unroll
  for (int i = 1; i < kOwn; ++i) most = fmaxf(most, own[i].x);
  row_maxes[half][of_half] = most;
  __syncthreads();
  most = fmaxf(most, row_maxes[1 - half][of_half]);
  const float base = most == -INFINITY ? 0.0f : most;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const float scale = Exp2(ScoreDifference(own[i].x, base));
    sum += own[i].y * scale;
    scales[2 * i + half][of_half] = scale;
  }
  sums[half][of_half] = sum;
  __syncthreads();
  const int at = lane / 8 * 16 + lane % 8 + 8 * below;  // this thread's row of 64
  float o[8] = {};
  for (int first = 0;;) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (first + u >= split_row.count) continue;
      const float scale = scales[first + u][at];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        o[e] += in_flight[u][e].x * scale;
        o[2 + e] += in_flight[u][e].y * scale;
        o[4 + e] += in_flight[u][e].z * scale;
        o[6 + e] += in_flight[u][e].w * scale;
      }
    }
    first += kAhead;
    if (first >= split_row.count) break;
    fetch(first);
  }
  const int row = split_row.index % rows * 64 + at, column = 8 * block;
  const float row_max = fmaxf(row_maxes[0][at], row_maxes[1][at]);
  float total = sums[0][at] + sums[1][at];
  const bool empty = total == 0.0f, says = block == 0;
  if (empty && says) FlagEmptyRow(params, b, h, row);
  if (!empty) total += SinkWeight<T>(p, h, row_max);
  if (says) StoreLse<T>(p, b, h, row, row_max, total);
  if (row >= p.S || column >= p.Dv) return;
  const float nothing = static_cast<EmptyRows>(p.empty_rows) == EmptyRows::kNan ? NAN : 0.0f;
  const float scale = Reciprocal(total);
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = cuda::Pack<T>(empty ? nothing : o[2 * i] * scale, empty ? nothing : o[2 * i + 1] * scale);
  }
  T* const to = static_cast<T*>(p.output) + b * p.output_stride.b + h * p.output_stride.h +
                static_cast<int64_t>(row) * p.output_stride.s + column;
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_COMBINE_CUH_
