// SPDX-License-Identifier: Apache-2.0
// Hidden values of active neurons: activation(gate) * up for each token that needs the neuron. A warp a neuron.
#ifndef STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_
#define STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/sparse_mlp/list.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// The hidden values of one neuron.
// kHasGate: the gate is a weight; otherwise it is an input, and the up weight is given. kHasOneToken: of the call.
template <typename T, int kBits, bool kVectors, bool kHasGate, bool kHasUp, bool kHasOneToken>
class HiddenValues {
 public:
  __device__ HiddenValues(const MlpParams& params, int32_t position, int64_t neuron)
      : p_(params), lane_(static_cast<int>(threadIdx.x) % 32), position_(position), neuron_(neuron) {}

  __device__ void Run(uint64_t mask) {
    while (mask != 0) {
      const int needed = __popcll(mask);
      if (kHasOneToken || needed == 1) {
        RunTokens<1>(&mask);
      } else if constexpr (kHasOneToken) {
      } else if constexpr (!kVectors) {
        RunTokens<4>(&mask);
      } else if (needed == 2) {
        RunTokens<2>(&mask);
      } else if (needed <= 4) {
        RunTokens<4>(&mask);
      } else {
        RunTokens<8>(&mask);
      }
    }
  }

 private:
  static constexpr int kRows = (kHasGate ? 1 : 0) + (kHasUp ? 1 : 0);

  // The first kTokens tokens of the mask, which it loses. The last one repeats where it has fewer.
  template <int kTokens>
  __device__ __forceinline__ void RunTokens(uint64_t* mask) {
    int token[kTokens], count = 0;
    const T* x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t == 0 || *mask != 0) {
        token[t] = __ffsll(static_cast<long long>(*mask)) - 1;
        *mask &= *mask - 1;
        ++count;
      } else {
        token[t] = token[t - 1];
      }
      x[t] = static_cast<const T*>(p_.input) + token[t] * p_.K;
    }
    float sums[kRows][kTokens] = {};
    const MlpRows* weights[kRows];
    int64_t row[kRows];
    if constexpr (kHasGate) weights[0] = &p_.gate_rows;
    if constexpr (kHasUp) weights[kRows - 1] = &p_.up_rows;
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = neuron_;
    // As many loads in flight as registers hold.
    constexpr int kLoads = (kTokens == 8 ? 4 : 8) / (kChunkWords<T, kBits> > 4 ? 2 : 1), kUnroll = kLoads / kRows;
    AddDots<T, kBits, kVectors, T, kRows, kTokens, kUnroll>(weights, row, x, lane_, 32, sums);
    float gate = 0.0f, up = 0.0f;
    int own = 0;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float first = SumOverWarp(sums[0][t]), last = kRows == 2 ? SumOverWarp(sums[kRows - 1][t]) : first;
      if (lane_ == t) gate = first, up = last, own = token[t];
    }
    if (lane_ >= count) return;
    if constexpr (kHasGate) {
      if (p_.gate_bias != nullptr) gate += ToFloat(static_cast<const T*>(p_.gate_bias)[neuron_]);
    } else {
      gate = ToFloat(static_cast<const T*>(p_.gate)[own * p_.F + neuron_]);
    }
    float h = Activated(p_.activation, gate);
    if constexpr (kHasUp) {
      if (p_.up_bias != nullptr) up += ToFloat(static_cast<const T*>(p_.up_bias)[neuron_]);
      h *= up;
    }
    p_.hidden[static_cast<int64_t>(position_) * p_.T + own] = h;
  }

  const MlpParams& p_;
  const int lane_;
  const int32_t position_;
  const int64_t neuron_;
};

// Down rows come to L2 while hidden values are computed, unless they are so many that they would leave it unread.
constexpr int64_t kMostPrefetched = int64_t{16} << 20;  // bytes

__device__ __forceinline__ void PrefetchDownRow(const MlpParams& p, int64_t neuron) {
  const char* const row = static_cast<const char*>(p.down_rows.data) + neuron * p.down_rows.stride;
  for (int64_t at = threadIdx.x % 32 * 128; at < p.down_rows.stride; at += 32 * 128) PrefetchL2(row + at);
}

template <typename T, int kBits, bool kVectors, bool kHasGate, bool kHasUp, bool kHasOneToken>
__global__ void __launch_bounds__(kMlpThreads, sizeof(T) == 4 ? 1 : 2)
    HiddenKernel(const __grid_constant__ MlpParams p) {
  __shared__ ActiveList::Storage storage;
  WaitForPrevious();
  LetNextStart();
  const ActiveList list(p, &storage);
  // Neighbours in the list go to different SMs.
  const int32_t size = list.size(), step = static_cast<int32_t>(gridDim.x) * (kMlpThreads / 32);
  int32_t i = static_cast<int32_t>(threadIdx.x / 32 * gridDim.x + blockIdx.x);
  const bool prefetches = size * p.down_rows.stride <= kMostPrefetched;
  ListEntry entry;
  if (i < size) entry = list.At(i);
  while (i < size) {
    ListEntry next;
    if (size - i > step) next = list.At(i + step);
    if (prefetches) PrefetchDownRow(p, entry.neuron);
    HiddenValues<T, kBits, kVectors, kHasGate, kHasUp, kHasOneToken>(p, i, entry.neuron).Run(entry.mask);
    if (size - i <= step) break;
    i += step;
    entry = next;
  }
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_
