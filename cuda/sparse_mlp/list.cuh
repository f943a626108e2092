// SPDX-License-Identifier: Apache-2.0
// The list of active neurons, read by a position that counts over all segments.
#ifndef STOF_CUDA_SPARSE_MLP_LIST_CUH_
#define STOF_CUDA_SPARSE_MLP_LIST_CUH_

#include "cuda/sparse_mlp/rows.cuh"

namespace stof {
namespace cuda {
namespace mlp {

struct ListEntry {
  int32_t neuron = 0;
  uint64_t mask = 0;
};

// The list of active neurons over all segments: a prefix sum of their counts, which all threads of a CTA compute.
class ActiveList {
 public:
  struct Storage {
    int32_t begins[kMlpMostSegments + 1];
    alignas(16) int32_t warps[kMlpWarps];  // a 16-byte load of these must not touch begins, which others write
  };

  __device__ ActiveList(const MlpParams& params, Storage* storage) : p_(params), s_(*storage) {
    constexpr int kOwn = kMlpMostSegments / kMlpThreads;
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    int32_t counts[kOwn], sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int segment = thread * kOwn + i;
      counts[i] = segment < p_.segments ? __ldcg(p_.counts + segment) : 0;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += counts[i];
    int32_t inclusive = sum;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int32_t before = __shfl_up_sync(kAllLanes, inclusive, offset);
      if (lane >= offset) inclusive += before;
    }
    if (lane == 31) s_.warps[warp] = inclusive;
    __syncthreads();
    int32_t begin = inclusive - sum;
    for (int w = 0; w < warp; ++w) begin += s_.warps[w];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      s_.begins[thread * kOwn + i] = begin;
      begin += counts[i];
    }
    if (thread == kMlpThreads - 1) s_.begins[kMlpMostSegments] = begin;
    __syncthreads();
  }

  __device__ int32_t size() const { return s_.begins[kMlpMostSegments]; }

  // The entry at a position below size().
  __device__ ListEntry At(int32_t position) const {
    int64_t at = position;
    if (size() != p_.F) {               // else all segments are full
      int low = 0, high = p_.segments;  // begins[low] <= position < begins[high]
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (s_.begins[middle] <= position ? low : high) = middle;
      }
      at = low * p_.segment + position - s_.begins[low];
    }
    ListEntry entry;
    entry.neuron = __ldcg(p_.neurons + at);
    entry.mask = __ldcg(reinterpret_cast<const unsigned long long*>(p_.masks) + at);
    return entry;
  }

 private:
  const MlpParams& p_;
  Storage& s_;
};

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_LIST_CUH_
