// SPDX-License-Identifier: Apache-2.0
// Hidden values of active neurons: activation(gate) * up for each token that needs the neuron. A warp a neuron.
#ifndef STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_
#define STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/sparse_mlp/ring.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// Stores the hidden value of a token. gate, up: its dot products with the rows of the neuron.
template <typename T, bool kHasGate, bool kHasUp>
__device__ __forceinline__ void StoreHidden(const MlpParams& p, int32_t position, int64_t neuron, int token, float gate,
                                            float up) {
  if constexpr (kHasGate) {
    if (p.gate_bias != nullptr) gate += ToFloat(static_cast<const T*>(p.gate_bias)[neuron]);
  } else {
    gate = ToFloat(static_cast<const T*>(p.gate)[token * p.F + neuron]);
  }
  float h = Activate(p.activation, gate);
  if constexpr (kHasUp) {
    if (p.up_bias != nullptr) up += ToFloat(static_cast<const T*>(p.up_bias)[neuron]);
    h *= up;
  }
  p.hidden[static_cast<int64_t>(position) * p.T + token] = h;
}

// Removes the first kTokens tokens from a mask, and returns their number. Where the mask has fewer, the last one
// repeats. own: token[lane]. An index that is not constant would put the array in local memory.
template <int kTokens>
__device__ __forceinline__ int TakeTokens(uint64_t* mask, int (&token)[kTokens], int* own) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int count = 0;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t == 0 || *mask != 0) {
      token[t] = __ffsll(static_cast<long long>(*mask)) - 1;
      if (lane == t) *own = token[t];
      *mask &= *mask - 1;
      ++count;
    } else {
      token[t] = token[t - 1];
    }
  }
  return count;
}

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

  // Takes the first kTokens tokens from the mask and computes their hidden values.
  template <int kTokens>
  __device__ __forceinline__ void RunTokens(uint64_t* mask) {
    int token[kTokens], own = 0;
    const int count = TakeTokens(mask, token, &own);
    const T* x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) x[t] = static_cast<const T*>(p_.input) + token[t] * p_.K;
    float sums[kRows][kTokens] = {};
    const NeuronRows* weights[kRows];
    int64_t row[kRows];
    if constexpr (kHasGate) weights[0] = &p_.gate_rows;
    if constexpr (kHasUp) weights[kRows - 1] = &p_.up_rows;
#pragma unroll
    for (int r = 0; r < kRows; ++r) row[r] = neuron_;
    // As many loads in flight as registers hold.
    constexpr int kLoads = (kTokens == 8 ? 4 : 8) / (kChunkWords<T, kBits> > 4 ? 2 : 1), kUnroll = kLoads / kRows;
    AddDots<T, kBits, kVectors, T, kRows, kTokens, kUnroll>(weights, row, x, lane_, 32, sums);
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float first = SumOverWarp(sums[0][t]), last = kRows == 2 ? SumOverWarp(sums[kRows - 1][t]) : first;
      if (lane_ == t) gate = first, up = last;
    }
    if (lane_ < count) StoreHidden<T, kHasGate, kHasUp>(p_, position_, neuron_, own, gate, up);
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

// The hidden values of a warp's neurons, whose rows stream through a ring: vectorized weights that are not quantized.
template <typename T, bool kHasGate, bool kHasUp, bool kHasOneToken>
class HiddenStream {
 public:
  __device__ __forceinline__ HiddenStream(const MlpParams& params, const ActiveList& list, void* shared)
      : p_(params),
        lane_(static_cast<int>(threadIdx.x) % 32),
        chunks_(params.K / kMlpChunk),
        steps_((chunks_ + 31) / 32),
        prefetches_(list.size() * params.down_rows.stride <= kMostPrefetched),
        // Neighbours in the list go to different SMs.
        entries_(list, static_cast<int32_t>(threadIdx.x / 32 * gridDim.x + blockIdx.x), list.size(),
                 static_cast<int32_t>(gridDim.x) * kMlpWarps),
        ring_(shared) {}

  __device__ __forceinline__ void Run() {
    PointAtRows();
    for (int i = 0; i < Stream::kSlots; ++i) Fill();
    for (int32_t k = 0; k < entries_.count(); ++k) {
      entries_.MoveTo(k);
      const int64_t neuron = entries_.NeuronOf(k);
      if (prefetches_) PrefetchDownRow(p_, neuron);
      uint64_t mask = kHasOneToken ? 1 : entries_.MaskOf(k);
      while (mask != 0) {
        const int needed = __popcll(mask);
        if (kHasOneToken || needed == 1) {
          RunTokens<1>(k, neuron, &mask);
        } else if constexpr (kHasOneToken) {
        } else if (needed == 2) {
          RunTokens<2>(k, neuron, &mask);
        } else if (needed <= 4) {
          RunTokens<4>(k, neuron, &mask);
        } else {
          RunTokens<kMostTokens>(k, neuron, &mask);
        }
      }
    }
  }

 private:
  static constexpr int kRows = (kHasGate ? 1 : 0) + (kHasUp ? 1 : 0);
  static constexpr int kWords = kChunkWords<T, 0>, kCopiesOfRow = kWords / 4;
  static constexpr int kMostTokens = 8;  // at a time: more of them read the rows once more
  using Stream = CopyRing<kRows * kCopiesOfRow>;

  // Points from_ at the rows of the neuron that is copied next.
  __device__ __forceinline__ void PointAtRows() {
    if (filled_ >= entries_.count()) return;
    const int64_t neuron = entries_.NeuronOf(filled_);
    if constexpr (kHasGate) from_[0] = static_cast<const char*>(p_.gate_rows.data) + neuron * p_.gate_rows.stride;
    if constexpr (kHasUp) from_[kRows - 1] = static_cast<const char*>(p_.up_rows.data) + neuron * p_.up_rows.stride;
    passes_ = kHasOneToken ? 1 : (__popcll(entries_.MaskOf(filled_)) + kMostTokens - 1) / kMostTokens;
  }
  // Copies a chunk a lane of each row.
  __device__ __forceinline__ void Fill() {
    if (filled_ < entries_.count() && steps_ > 0) {
      const int64_t chunk = int64_t{filled_step_} * 32 + lane_;
#pragma unroll
      for (int i = 0; i < kRows * kCopiesOfRow; ++i) {
        ring_.Copy(i, from_[i / kCopiesOfRow] + chunk * (4 * kWords) + i % kCopiesOfRow * kCopyBytes, chunk < chunks_);
      }
      if (++filled_step_ == steps_) {
        filled_step_ = 0;
        if (--passes_ == 0) {
          ++filled_;
          PointAtRows();
        }
      }
    }
    ring_.Commit();
  }

  template <int kTokens>
  __device__ __forceinline__ void RunTokens(int32_t k, int64_t neuron, uint64_t* mask) {
    int token[kTokens], own = 0;
    const int count = TakeTokens(mask, token, &own);
    float sums[kRows][kTokens] = {};
    for (int32_t step = 0; step < steps_; ++step) {
      const int64_t chunk = int64_t{step} * 32 + lane_;
      ring_.Wait();
      if (chunk < chunks_) {
        float w[kRows][kMlpChunk];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          uint32_t words[kWords];
#pragma unroll
          for (int i = 0; i < kCopiesOfRow; ++i) ring_.Read(r * kCopiesOfRow + i, words + 4 * i);
          ToFloats<T>(words, w[r]);
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          float x[kMlpChunk];
          LoadToken<T, true>(static_cast<const T*>(p_.input) + token[t] * p_.K, chunk, p_.K, x);
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int i = 0; i < kMlpChunk; ++i) sums[r][t] = fmaf(w[r][i], x[i], sums[r][t]);
          }
        }
      }
      ring_.Release();
      Fill();
    }
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float first = SumOverWarp(sums[0][t]), last = kRows == 2 ? SumOverWarp(sums[kRows - 1][t]) : first;
      if (lane_ == t) gate = first, up = last;
    }
    if (lane_ < count) StoreHidden<T, kHasGate, kHasUp>(p_, entries_.PositionOf(k), neuron, own, gate, up);
  }

  const MlpParams& p_;
  const int lane_;
  const int64_t chunks_;
  const int32_t steps_;
  const bool prefetches_;
  WarpEntries<> entries_;
  Stream ring_;
  // What is copied next: step filled_step_ of entry filled_, whose rows are read passes_ times more.
  int32_t filled_ = 0, filled_step_ = 0, passes_ = 0;
  const char* from_[kRows] = {};
};

template <typename T, int kBits, bool kVectors, bool kHasGate, bool kHasUp, bool kHasOneToken>
__global__ void __launch_bounds__(kMlpThreads, sizeof(T) == 4 ? 1 : 2)
    HiddenKernel(const __grid_constant__ MlpParams p) {
  __shared__ ActiveList::Storage storage;
  WaitForPrevious();
  LetNextStart();
  const ActiveList list(p, &storage);
  // Neighbours in the list go to different SMs.
  const int32_t size = list.size(), step = static_cast<int32_t>(gridDim.x) * kMlpWarps;
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

template <typename T, bool kHasGate, bool kHasUp, bool kHasOneToken>
__global__ void __launch_bounds__(kMlpThreads, kHasOneToken ? 4 : 2)
    HiddenStreamKernel(const __grid_constant__ MlpParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ ActiveList::Storage storage;
  WaitForPrevious();
  LetNextStart();
  const ActiveList list(p, &storage);
  HiddenStream<T, kHasGate, kHasUp, kHasOneToken>(p, list, shared).Run();
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_HIDDEN_CUH_
