// SPDX-License-Identifier: Apache-2.0
// The copy that kernels of chains are measured by, beside cudaMemcpy's, which is slower at some sizes.
#include <cstdint>

#include "cuda/bench/bench_copy.h"

namespace stof {
namespace {

constexpr int kThreads = 256, kEach = 2;

__global__ void __launch_bounds__(kThreads) Copy(const uint4* from, uint4* to, int64_t count) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads * kEach + threadIdx.x;
  uint4 four[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * kThreads < count) four[i] = __ldg(from + first + i * kThreads);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (first + i * kThreads < count) to[first + i * kThreads] = four[i];
  }
}

}  // namespace

cudaError_t CopyByKernel(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(bytes / sizeof(uint4));
  const int64_t of_cta = kThreads * kEach;
  Copy<<<static_cast<unsigned>((count + of_cta - 1) / of_cta), kThreads, 0, stream>>>(static_cast<const uint4*>(from),
                                                                                      static_cast<uint4*>(to), count);
  return cudaGetLastError();
}

}  // namespace stof
