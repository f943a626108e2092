// SPDX-License-Identifier: Apache-2.0
// The combine kernel of split-KV decode attention: it scales the splits of a row to their common row max, adds them up
// and stores the output.
#ifndef STOF_CUDA_ATTENTION_DECODE_COMBINE_CUH_
#define STOF_CUDA_ATTENTION_DECODE_COMBINE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/decode/common.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {

// A CTA combines the splits of one row.
template <typename T>
__global__ void __launch_bounds__(128) DecodeCombine(const __grid_constant__ DecodeParams params) {
  constexpr int kWarps = 4;
  constexpr float kNoKeys = -1.0f;  // in place of a weight
  __shared__ float weight[kMostDecodeSplits], reduced[2][kWarps], part[kWarps][256];
  const AttentionParams& p = params.attention;
  const int64_t row = blockIdx.x;
  WaitForPrevious();
  LetNextStart();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (params.second_pass != 0 && params.empty_rows[row] == 0) return;
  const int split = threadIdx.x;
  float maximum = -INFINITY, sum = 0.0f;
  if (split < params.splits) {
    maximum = params.split_stats[2 * (row * params.splits + split)];
    sum = params.split_stats[2 * (row * params.splits + split) + 1];
  }
  float top = maximum;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (lane == 0) reduced[0][warp] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) top = fmaxf(top, reduced[0][w]);
  // A split without a key has stored no output.
  const float own = maximum == -INFINITY ? (sum == 0.0f ? kNoKeys : 0.0f) : Exp2(maximum - top);
  if (split < params.splits) weight[split] = own;
  sum *= own;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) reduced[1][warp] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += reduced[1][w];
  const bool is_invalid = ReadInvalid(params, static_cast<int>(row / p.S / p.H)) != 0;
  const bool empty = total == 0.0f && !is_invalid;
  if (params.empty_rows != nullptr && params.second_pass == 0 && threadIdx.x == 0)
    params.empty_rows[row] = empty ? 1 : 0;
  for (int d = lane; d < p.Dv; d += 32) {
    float x = 0.0f;
#pragma unroll 4
    for (int i = warp; i < params.splits; i += kWarps) {
      if (weight[i] == kNoKeys) continue;
      x = fmaf(params.split_output[(row * params.splits + i) * p.Dv + d], weight[i], x);
    }
    part[warp][d] = x;
  }
  __syncthreads();
  const int h = static_cast<int>(row / p.S % p.H), s = static_cast<int>(row % p.S);
  const int b = static_cast<int>(row / p.S / p.H);
  T* to = static_cast<T*>(p.output) + b * p.output_stride.b + h * p.output_stride.h + s * p.output_stride.s;
  const float row_sum = is_invalid ? NAN : total + (empty ? 0.0f : SinkWeight<T>(p, h, top));
  if (threadIdx.x == 0) StoreLse<T>(p, b, h, s, top, row_sum);
  for (int d = threadIdx.x; d < p.Dv; d += 128) {
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += part[w][d];
    to[d] = FromFloat<T>(empty ? EmptyValue(p) : x / row_sum);
  }
}

template <typename T>
int LaunchCombine(const DecodeParams& params, void* stream) {
  const AttentionParams& p = params.attention;
  constexpr auto kKernel = DecodeCombine<T>;
  return LaunchKernel<DecodeParams, kKernel>(params, static_cast<unsigned>(int64_t{p.B} * p.H * p.S), 128, 0, stream,
                                             CanStartEarly<DecodeParams, kKernel>());
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_COMBINE_CUH_
