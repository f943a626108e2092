// SPDX-License-Identifier: Apache-2.0
// The kernel that orders the tile rows of each head by falling number of chosen tiles, so that what persistent CTAs
// compute at the same time takes about the same.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ORDER_CUH_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ORDER_CUH_

#include "cuda/attention/choose_blocks/params.h"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {
namespace choose {

constexpr int kOrderThreads = 256, kBuckets = 1024;

// A CTA sorts the tile rows of one batch and head into buckets. Rows of one bucket may come in any order.
__global__ void __launch_bounds__(kOrderThreads) OrderRows(const __grid_constant__ BlockChoiceParams p) {
  constexpr int kOwn = kBuckets / kOrderThreads;  // buckets of a thread
  __shared__ int starts[kBuckets], of_warps[kOrderThreads / 32];
  LetNextStart();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  for (int i = thread; i < kBuckets; i += kOrderThreads) starts[i] = 0;
  WaitForPrevious();
  __syncthreads();
  const auto table = static_cast<int>(blockIdx.x);
  const int64_t first = int64_t{table} * p.row_blocks;
  const auto bucket = [&](int row) {
    const int64_t tiles = p.row_end[first + row] - p.row_ptr[first + row];
    return kBuckets - 1 - static_cast<int>(tiles * (kBuckets - 1) / p.list_stride);
  };
  for (int row = thread; row < p.row_blocks; row += kOrderThreads) atomicAdd(&starts[bucket(row)], 1);
  __syncthreads();
  int own[kOwn], sum = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) own[i] = sum, sum += starts[kOwn * thread + i];
  int before = sum;  // of the lanes up to this one
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int other = __shfl_up_sync(~0u, before, by);
    if (lane >= by) before += other;
  }
  if (lane == 31) of_warps[thread / 32] = before;
  __syncthreads();
  before -= sum;
  for (int warp = 0; warp < thread / 32; ++warp) before += of_warps[warp];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) starts[kOwn * thread + i] = before + own[i];
  __syncthreads();
  for (int row = thread; row < p.row_blocks; row += kOrderThreads) {
    p.order[first + atomicAdd(&starts[bucket(row)], 1)] = row;
  }
  if (thread == 0) p.layout[table] = table;
}

}  // namespace choose
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ORDER_CUH_
