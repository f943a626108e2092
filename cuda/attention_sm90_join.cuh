// SPDX-License-Identifier: Apache-2.0
// What ends a row of the 9.0 kernels, whoever ends it, and the kernel that ends rows which workers have taken in parts:
// each part's outputs are brought to the maximum of all and added up, as with decoding over splits.
#ifndef STOF_CUDA_ATTENTION_SM90_JOIN_CUH_
#define STOF_CUDA_ATTENTION_SM90_JOIN_CUH_

#include <cuda_runtime.h>

#include "cuda/attention_sm90.h"
#include "cuda/attention_sm90_shape.cuh"
#include "cuda/launch.cuh"
#include "cuda/log_sum.cuh"
#include "cuda/mma_sm90.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// What the sink adds to the sum of a row with this maximum.
template <typename T>
__device__ __forceinline__ float SinkOf(const AttentionParams& p, int h, float high) {
  if (p.sink == nullptr) return 0.0f;
  const float logit =
      p.sink_is_float != 0 ? static_cast<const float*>(p.sink)[h] : ToFloat(static_cast<const T*>(p.sink)[h]);
  return Exp2(fminf(logit * kLog2E - high, 127.0f));
}

__device__ __forceinline__ void SayEmpty(const Sm90Params& params, int b, int h, int row) {
  const AttentionParams& p = params.attention;
  if (row >= p.S || params.redo == nullptr) return;
  params.redo[(b * p.H + h) * ((p.S + 63) / 64) + row / 64] = 1;
}

constexpr int kJoined = 8;  // columns of a CTA: eight of 64 rows are four numbers of each thread

// A CTA joins 8 columns of one row of tiles.
template <typename T, int kHead>
__global__ void __launch_bounds__(kWarpgroup) JoinKernel(const __grid_constant__ Sm90Params params) {
  LetNextStart();
  const AttentionParams& p = params.attention;
  const int lane = static_cast<int>(threadIdx.x) % 32, slice = static_cast<int>(blockIdx.x) % (kHead / kJoined);
  const CutRow cut =
      params.cut[blockIdx.x / (kHead / kJoined)];  // of a plan, which was there before the kernel in front
  const int rows = (p.S + 63) / 64, bh = cut.item / rows, b = bh / p.H, h = bh % p.H;
  const int own = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;  // of 64 rows, and 8 below
  WaitForPrevious();
  const float2* const sums = params.part_sums + cut.first * 64 + own;
  float high[2] = {-INFINITY, -INFINITY};
  for (int i = 0; i < cut.count; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) high[r] = fmaxf(high[r], sums[i * 64 + 8 * r].x);
  }
  const float base[2] = {high[0] == -INFINITY ? 0.0f : high[0], high[1] == -INFINITY ? 0.0f : high[1]};
  float total[2] = {}, o[4] = {};
  const float* const from =
      params.parts + (static_cast<int64_t>(cut.first) * (kHead / 2) + 4 * slice) * kWarpgroup + threadIdx.x;
#pragma unroll 4
  for (int i = 0; i < cut.count; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 part = sums[i * 64 + 8 * r];
      const float scale = Exp2(part.x - base[r]);
      total[r] += part.y * scale;
#pragma unroll
      for (int e = 0; e < 2; ++e) o[2 * r + e] += from[(i * (kHead / 2) + 2 * r + e) * kWarpgroup] * scale;
    }
  }
  const float nothing = static_cast<EmptyRows>(p.empty_rows) == EmptyRows::kNan ? NAN : 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = cut.item % rows * 64 + own + 8 * r;
    const bool empty = total[r] == 0.0f, says = slice == 0 && lane % 4 == 0;
    if (empty && says) SayEmpty(params, b, h, row);
    if (!empty) total[r] += SinkOf<T>(p, h, high[r]);
    if (says) StoreLogSum<T>(p, b, h, row, high[r], total[r]);
    const float scale = Reciprocal(total[r]);
    const int column = slice * kJoined + lane % 4 * 2;
    if (row >= p.S || column >= p.Dv) continue;
    T* const to = static_cast<T*>(p.output) + b * p.output_stride.b + h * p.output_stride.h + row * p.output_stride.s;
    *reinterpret_cast<uint32_t*>(to + column) =
        cuda::Pack<T>(empty ? nothing : o[2 * r] * scale, empty ? nothing : o[2 * r + 1] * scale);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_JOIN_CUH_
