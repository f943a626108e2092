// SPDX-License-Identifier: Apache-2.0
// The output: the sum of the down rows of active neurons, weighted by hidden values.
//
// A CTA sums a slice of columns over a split of the list for a group of tokens. Its warps share the neurons, and their
// sums meet in shared memory. The last CTA of a slice to finish adds the splits in their order, so that results do not
// depend on which one that is.
#ifndef STOF_CUDA_SPARSE_MLP_DOWN_CUH_
#define STOF_CUDA_SPARSE_MLP_DOWN_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/common/round.cuh"
#include "cuda/sparse_mlp/ring.cuh"

namespace stof {
namespace cuda {
namespace mlp {

constexpr int kStagedNeurons = 128;  // whose hidden values are in shared memory at a time

// Eight columns of a down row, as they lie in memory.
template <typename T, int kBits>
struct DownChunk {
  static constexpr int kWords = kChunkWords<T, kBits>;
  uint32_t words[kWords];
  uint32_t scales[kBits == 0 ? 1 : kChunkWords<T, 0>];
  uint32_t zeros[2];

  __device__ __forceinline__ void Load(const NeuronRows& rows, int64_t neuron, int64_t column) {
    LoadStreamed(words, static_cast<const char*>(rows.data) + neuron * rows.stride +
                            (kBits == 0 ? column * static_cast<int64_t>(sizeof(T)) : column * kBits / 8));
    if constexpr (kBits != 0) {
      const int64_t group = (neuron >> rows.block_shift) * rows.size + column;
      LoadConstant(scales, reinterpret_cast<const uint32_t*>(reinterpret_cast<const T*>(rows.scales) + group));
      zeros[0] = zeros[1] = kBits == 4 ? 0x08080808u : 0x80808080u;
      if (rows.zero_points != nullptr) LoadConstant(zeros, reinterpret_cast<const uint32_t*>(rows.zero_points + group));
    }
  }
  __device__ __forceinline__ void ToValues(float (&out)[kMlpChunk]) const {
    if constexpr (kBits == 0) {
      ToFloats<T>(words, out);
    } else {
      float zero[kMlpChunk], scale[kMlpChunk];
      QuantizedToFloats<kBits>(words, 0.0f, out);
      QuantizedToFloats<8>(zeros, 0.0f, zero);
      ToFloats<T>(scales, scale);
#pragma unroll
      for (int i = 0; i < kMlpChunk; ++i) out[i] = (out[i] - zero[i]) * scale[i];
    }
  }
};

// Columns [column, column + count) of a down row, one by one; zeros beyond.
template <typename T, int kBits>
__device__ __forceinline__ void LoadColumns(const NeuronRows& rows, int64_t neuron, int64_t column, int64_t count,
                                            float (&out)[kMlpChunk]) {
  const char* const row = static_cast<const char*>(rows.data) + neuron * rows.stride;
  const int64_t group = (neuron >> rows.block_shift) * rows.size + column;
#pragma unroll
  for (int i = 0; i < kMlpChunk; ++i) {
    out[i] = 0.0f;
    if (i >= count) continue;
    if constexpr (kBits == 0) {
      out[i] = ToFloat(reinterpret_cast<const T*>(row)[column + i]);
    } else {
      const auto* const bytes = reinterpret_cast<const uint8_t*>(row);
      const int q = kBits == 8 ? bytes[column + i] : bytes[(column + i) / 2] >> (column + i) % 2 * 4 & 15;
      const int zero = rows.zero_points == nullptr ? 1 << (kBits - 1) : rows.zero_points[group + i];
      out[i] = static_cast<float>(q - zero) * ToFloat(reinterpret_cast<const T*>(rows.scales)[group + i]);
    }
  }
}

using DownSums = float[kMlpWarps][kMlpSliceColumns];  // of the warps, stored four at a time

// Which part of the output a CTA sums.
template <int kTokens>
struct DownPart {
  int slice, split, group, first_token;
  int64_t column, columns;  // of this lane: the first of eight, and how many there are from it on

  __device__ explicit DownPart(const MlpParams& p) {
    slice = static_cast<int>(blockIdx.x) % p.slices, split = static_cast<int>(blockIdx.x) / p.slices % p.splits;
    group = static_cast<int>(blockIdx.x) / (p.slices * p.splits), first_token = group * kTokens;
    column = slice * int64_t{kMlpSliceColumns} + static_cast<int>(threadIdx.x) % 32 * kMlpChunk;
    columns = p.N - column;
  }
  __device__ int32_t Begin(const MlpParams& p, int32_t size) const {
    return static_cast<int32_t>(int64_t{size} * split / p.splits);
  }
  __device__ int32_t End(const MlpParams& p, int32_t size) const {
    return static_cast<int32_t>(int64_t{size} * (split + 1) / p.splits);
  }
  // The bits of the group's tokens.
  __device__ __forceinline__ uint32_t MaskOf(uint64_t mask) const {
    return static_cast<uint32_t>(mask >> first_token) & ((1u << kTokens) - 1);
  }
};

// The hidden value of a token that needs the entry: without the hidden kernel, the activated gate.
template <typename T>
__device__ __forceinline__ float HiddenOf(const MlpParams& p, int32_t position, int64_t neuron, int64_t token) {
  if (p.runs_hidden_kernel) {
    return __ldcg(p.hidden + static_cast<int64_t>(position) * p.T + token);
  }
  return Activate(p.activation, ToFloat(static_cast<const T*>(p.gate)[token * p.F + neuron]));
}

template <typename T>
__device__ __forceinline__ void WriteOutput(const MlpParams& p, int64_t token, int64_t column, float y) {
  if (p.down_bias != nullptr) y += ToFloat(static_cast<const T*>(p.down_bias)[column]);
  static_cast<T*>(p.output)[token * p.N + column] = Round<T>(y);
}

// Whether all other CTAs that share a slice have written their partial sums. `part`: the slice of a group of tokens.
__device__ __forceinline__ bool IsLastOfSlice(const MlpParams& p, int part, bool* shared) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared = atomicAdd(p.finished + part, 1) == p.splits - 1;
  __syncthreads();
  if (*shared) __threadfence();
  return *shared;
}

// Adds the sums of the warps, and those of the splits where there are several; writes the output.
template <typename T, int kTokens>
__device__ __forceinline__ void FinishDown(const MlpParams& p, const DownPart<kTokens>& part,
                                           const float (&sums)[kTokens][kMlpChunk], DownSums& all, bool* is_last) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int tokens = min(kTokens, p.T - part.first_token);
  // The sums of all warps, a token at a time. Thread i has column i of the slice.
  const int64_t own = part.slice * int64_t{kMlpSliceColumns} + thread;
  static_assert(kMlpSliceColumns == kMlpThreads, "a thread a column");
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tokens) break;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMlpChunk; k += 4) {
      *reinterpret_cast<float4*>(&all[warp][lane * kMlpChunk + k]) =
          make_float4(sums[t][k], sums[t][k + 1], sums[t][k + 2], sums[t][k + 3]);
    }
    __syncthreads();
    float y = all[0][thread];
#pragma unroll
    for (int w = 1; w < kMlpWarps; ++w) y += all[w][thread];
    if (own >= p.N) continue;
    if (p.splits == 1) {
      WriteOutput<T>(p, part.first_token + t, own, y);
    } else {
      __stcg(p.partials + (int64_t{part.split} * p.T + part.first_token + t) * p.N + own, y);
    }
  }
  if (p.splits == 1 || !IsLastOfSlice(p, part.group * p.slices + part.slice, is_last) || own >= p.N) return;
  for (int t = 0; t < tokens; ++t) {
    const float* const from = p.partials + int64_t{part.first_token + t} * p.N + own;
    float y = 0.0f;
#pragma unroll 16
    for (int i = 0; i < p.splits; ++i) y += __ldcg(from + int64_t{i} * p.T * p.N);
    WriteOutput<T>(p, part.first_token + t, own, y);
  }
}

template <int kTokens>
struct DownStorage {
  ActiveList::Storage list;
  int32_t neurons[kStagedNeurons];
  uint32_t masks[kStagedNeurons];  // of the group's tokens
  float hidden[kStagedNeurons][kTokens];
  alignas(16) DownSums sums;
  bool is_last;
};

// All weights; those that are vectorized and not quantized have the kernel below.
template <typename T, int kBits, bool kVectors, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, 2) DownKernel(const __grid_constant__ MlpParams p) {
  constexpr int kUnroll = sizeof(T) == 4 ? 2 : 4;
  __shared__ DownStorage<kTokens> s;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const DownPart<kTokens> part(p);

  if (!p.runs_hidden_kernel) WaitForPrevious();
  const ActiveList list(p, &s.list);
  const int32_t begin = part.Begin(p, list.size()), end = part.End(p, list.size());
  if (p.runs_hidden_kernel) WaitForPrevious();
  LetNextStart();

  float sums[kTokens][kMlpChunk] = {};
  for (int32_t first = begin; first < end; first += kStagedNeurons) {
    const int32_t staged = min(kStagedNeurons, end - first);
    __syncthreads();
    if (thread < staged) {
      const ListEntry entry = list.At(first + thread);
      const auto mask = part.MaskOf(entry.mask);
      s.neurons[thread] = entry.neuron;
      s.masks[thread] = mask;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if ((mask >> t & 1) == 0) continue;
        s.hidden[thread][t] = HiddenOf<T>(p, first + thread, entry.neuron, part.first_token + t);
      }
    }
    __syncthreads();
    if (part.columns <= 0) continue;
    for (int i = warp; i < staged; i += kMlpWarps * kUnroll) {
      [[maybe_unused]] DownChunk<T, kBits> loaded[kUnroll];
      if constexpr (kVectors) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = i + u * kMlpWarps;
          if (at < staged && s.masks[at] != 0) loaded[u].Load(p.down_rows, s.neurons[at], part.column);
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = i + u * kMlpWarps;
        if (at >= staged || s.masks[at] == 0) continue;
        float w[kMlpChunk];
        if constexpr (kVectors) {
          loaded[u].ToValues(w);
        } else {
          LoadColumns<T, kBits>(p.down_rows, s.neurons[at], part.column, part.columns, w);
        }
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if ((s.masks[at] >> t & 1) == 0) continue;  // 0 times infinity would be NaN
          const float h = s.hidden[at][t];
#pragma unroll
          for (int k = 0; k < kMlpChunk; ++k) sums[t][k] = fmaf(h, w[k], sums[t][k]);
        }
      }
    }
  }
  FinishDown<T>(p, part, sums, s.sums, &s.is_last);
}

// Hidden values of 32 entries of a warp: lane i has those of entry i.
template <typename T, int kTokens>
__device__ __forceinline__ void LoadHidden(const MlpParams& p, const DownPart<kTokens>& part, int32_t position,
                                           const ListEntry& entry, float (&to)[kTokens]) {
  const uint32_t mask = part.MaskOf(entry.mask);  // 0 beyond the last entry
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    to[t] = (mask >> t & 1) != 0 ? HiddenOf<T>(p, position, entry.neuron, part.first_token + t) : 0.0f;
  }
}

// Rows stream through a ring, kStreamRows of a slot. Copies start before the hidden values are there.
constexpr int kStreamRows = 2;

template <typename T, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, kTokens == 1 ? 4 : 2)
    DownStreamKernel(const __grid_constant__ MlpParams p) {
  constexpr int kWords = kChunkWords<T, 0>, kCopiesOfRow = kWords / 4;
  using Stream = CopyRing<kStreamRows * kCopiesOfRow>;
  extern __shared__ __align__(128) uint8_t shared[];
  static_assert(sizeof(DownSums) <= kRingsBytes, "the warps' sums take the place of the rings");
  __shared__ ActiveList::Storage storage;
  __shared__ bool is_last;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const DownPart<kTokens> part(p);

  if (!p.runs_hidden_kernel) WaitForPrevious();
  const ActiveList list(p, &storage);
  WarpEntries<> entries(list, part.Begin(p, list.size()) + warp, part.End(p, list.size()), kMlpWarps);
  Stream ring(shared);
  int32_t filled = 0;
  const char* const from = static_cast<const char*>(p.down_rows.data) + part.column * static_cast<int64_t>(sizeof(T));
  const auto fill = [&] {
#pragma unroll
    for (int r = 0; r < kStreamRows; ++r) {
      const int32_t k = filled + r;
      if (k >= entries.count()) continue;
      const char* const row = from + int64_t{entries.NeuronOf(k)} * p.down_rows.stride;
      const bool is_needed = kTokens == 1 || part.MaskOf(entries.MaskOf(k)) != 0;
#pragma unroll
      for (int i = 0; i < kCopiesOfRow; ++i) {
        ring.Copy(r * kCopiesOfRow + i, row + i * kCopyBytes, is_needed && part.columns > 0);
      }
    }
    filled += kStreamRows;
    ring.Commit();
  };
  for (int i = 0; i < Stream::kSlots; ++i) fill();
  if (p.runs_hidden_kernel) WaitForPrevious();
  LetNextStart();

  constexpr bool kIsAhead = kTokens < 8;  // the next hidden values are loaded: registers suffice
  float sums[kTokens][kMlpChunk] = {}, current[kTokens];
  [[maybe_unused]] float next[kTokens];
  LoadHidden<T>(p, part, entries.PositionOf(lane), entries.current(), current);
  if constexpr (kIsAhead) LoadHidden<T>(p, part, entries.PositionOf(32 + lane), entries.next(), next);
  for (int32_t first = 0; first < entries.count(); first += kStreamRows) {
    if (first % 32 == 0 && first > 0) {
      entries.MoveTo(first);
      if constexpr (kIsAhead) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) current[t] = next[t];
        LoadHidden<T>(p, part, entries.PositionOf(first + 32 + lane), entries.next(), next);
      } else {
        LoadHidden<T>(p, part, entries.PositionOf(first + lane), entries.current(), current);
      }
    }
    ring.Wait();
#pragma unroll
    for (int r = 0; r < kStreamRows; ++r) {
      const int32_t k = first + r;
      if (k >= entries.count()) continue;
      const uint32_t mask = kTokens == 1 ? 1 : part.MaskOf(entries.MaskOf(k));
      if (mask == 0) continue;
      uint32_t words[kWords];
#pragma unroll
      for (int i = 0; i < kCopiesOfRow; ++i) ring.Read(r * kCopiesOfRow + i, words + 4 * i);
      float w[kMlpChunk];
      ToFloats<T>(words, w);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (kTokens > 1 && (mask >> t & 1) == 0) continue;  // 0 times infinity would be NaN
        const float h = __shfl_sync(kAllLanes, current[t], k % 32);
#pragma unroll
        for (int i = 0; i < kMlpChunk; ++i) sums[t][i] = fmaf(h, w[i], sums[t][i]);
      }
    }
    ring.Release();
    fill();
  }
  FinishDown<T>(p, part, sums, *reinterpret_cast<DownSums*>(shared), &is_last);
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_DOWN_CUH_
