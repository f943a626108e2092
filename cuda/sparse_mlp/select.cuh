// SPDX-License-Identifier: Apache-2.0
// Which neurons are active: by the gate, or by the scores of a predictor, and the list of them.
#ifndef STOF_CUDA_SPARSE_MLP_SELECT_CUH_
#define STOF_CUDA_SPARSE_MLP_SELECT_CUH_

#include "cuda/common/launch.cuh"
#include "cuda/sparse_mlp/rows.cuh"

namespace stof {
namespace cuda {
namespace mlp {

constexpr int kProjectThreads = 128, kProjectWarps = kProjectThreads / 32;
constexpr int kScoreRows = 4;  // neurons of a warp

// Tokens [begin, begin + kTokens) of [tokens, stride]; those beyond the last one repeat it.
template <typename X, int kTokens>
__device__ __forceinline__ void PointAtTokens(const void* base, int64_t stride, int begin, int tokens,
                                              const X* (&to)[kTokens]) {
#pragma unroll
  for (int t = 0; t < kTokens; ++t) to[t] = static_cast<const X*>(base) + min(begin + t, tokens - 1) * stride;
}

// The activation between the factors of a predictor. NaN stays NaN.
template <typename Params>
__device__ __forceinline__ float ActivatedProjection(const Params& p, float sum) {
  return p.has_predictor_relu && sum < 0.0f ? 0.0f : sum;
}

// projected[t, r] = row r of predictor_down · token t. A CTA a row; rows from R on give zeros.
template <typename T, int kBits, bool kVectors, int kTokens>
__global__ void __launch_bounds__(kProjectThreads) ProjectKernel(const __grid_constant__ MlpParams p) {
  __shared__ float sums[kProjectWarps][kTokens];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t r = blockIdx.x;
  if (r < p.R) {  // L2 sees what the kernels before still write, so that its lines may be fetched now
    const char* const row = static_cast<const char*>(p.predictor_down.data) + r * p.predictor_down.stride;
    for (int64_t at = threadIdx.x * 128; at < p.predictor_down.stride; at += kProjectThreads * 128) {
      PrefetchL2(row + at);
    }
  }
  WaitForPrevious();
  LetNextStart();
  for (int begin = 0; begin < p.T; begin += kTokens) {
    float own[1][kTokens] = {};
    if (r < p.R) {
      const T* tokens[kTokens];
      PointAtTokens(p.input, p.K, begin, p.T, tokens);
      const NeuronRows* const weights[1] = {&p.predictor_down};
      const int64_t row[1] = {r};
      AddDots<T, kBits, kVectors, T, 1, kTokens, 4>(weights, row, tokens, threadIdx.x, kProjectThreads, own);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float sum = SumOverWarp(own[0][t]);
      if (lane == 0) sums[warp][t] = sum;
    }
    __syncthreads();
    if (threadIdx.x < kTokens && begin + static_cast<int>(threadIdx.x) < p.T) {
      float sum = sums[0][threadIdx.x];
#pragma unroll
      for (int w = 1; w < kProjectWarps; ++w) sum += sums[w][threadIdx.x];
      p.projected[(begin + static_cast<int>(threadIdx.x)) * p.projected_stride + r] = ActivatedProjection(p, sum);
    }
    __syncthreads();
  }
}

// Appends those of 32 neurons whose mask is not 0 to the list of a segment; called by one warp.
__device__ __forceinline__ void AppendActive(const MlpParams& p, int64_t segment, int64_t neuron, uint64_t mask,
                                             int* count) {
  const unsigned active = __ballot_sync(kAllLanes, mask != 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (mask != 0) {
    const int64_t at = segment * p.segment + *count + __popc(active & ((1u << lane) - 1));
    p.neurons[at] = static_cast<int32_t>(neuron);
    p.masks[at] = mask;
  }
  *count += __popc(active);
}

// The down kernel counts from 0.
__device__ __forceinline__ void ClearFinished(const MlpParams& p) {
  if (blockIdx.x != 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < p.token_groups * p.slices; i += static_cast<int>(blockDim.x)) {
    p.finished[i] = 0;
  }
}

// The neurons of a segment whose gate makes them active. Warp w looks at tokens w, w + kMlpWarps, ...
template <typename T>
__global__ void __launch_bounds__(kMlpThreads) SelectKernel(const __grid_constant__ MlpParams p) {
  __shared__ uint64_t masks[kMlpWarps][32];
  WaitForPrevious();
  LetNextStart();
  ClearFinished(p);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t segment = blockIdx.x, begin = segment * p.segment, end = min(p.F, begin + p.segment);
  int count = 0;
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t neuron = first + lane;
    uint64_t mask = 0;
    for (int t = warp; t < p.T && neuron < end; t += kMlpWarps) {
      const float x = Activate(p.activation, ToFloat(static_cast<const T*>(p.gate)[t * p.F + neuron]));
      mask |= static_cast<uint64_t>(IsActive(p, x, neuron)) << t;
    }
    masks[warp][lane] = mask;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int w = 1; w < kMlpWarps; ++w) mask |= masks[w][lane];
      AppendActive(p, segment, neuron, mask, &count);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0 && segment < p.segments) p.counts[segment] = count;
}

// sums[i] += chunk i · the same chunk of a token.
template <typename T, int kBits>
__device__ __forceinline__ void AddChunks(const Chunk<T, kBits> (&chunks)[kScoreRows], const float* token,
                                          int64_t chunk, int64_t size, float (&sums)[kScoreRows][1]) {
  float x[kMlpChunk];
  LoadToken<float, true>(token, chunk, size, x);
#pragma unroll
  for (int i = 0; i < kScoreRows; ++i) sums[i][0] += chunks[i].Dot(x);
}

// The neurons of a segment whose scores, predictor_up · projected, make them active.
// Longer than 80 lines: weights that are loaded before the wait for the projection are used behind it, in registers.
template <typename T, int kBits, bool kVectors, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, kTokens == 1 && kVectors ? 3
                                               : kBits == 0 ? 2
                                                            : 1) ScoreKernel(const __grid_constant__ MlpParams p) {
  __shared__ uint64_t masks[32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t segment = blockIdx.x, begin = segment * p.segment, end = min(p.F, begin + p.segment);
  // The projection runs before this kernel, and waited for all others: the weights are there.
  constexpr int kEarly = kTokens == 1 && kVectors ? 2 : 0;  // chunks a lane of each row, of the first 32 neurons
  [[maybe_unused]] Chunk<T, kBits> early[kEarly + 1][kScoreRows];
  if constexpr (kEarly > 0) {
#pragma unroll
    for (int u = 0; u < kEarly; ++u) {
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i) {
        const int64_t row = begin + warp * kScoreRows + i;
        if (row < end && (lane + 32 * u) * kMlpChunk < p.R) {
          early[u][i].template Load<true>(p.predictor_up, row, lane + 32 * u);
        }
      }
    }
  } else {
    const int64_t bytes = (min(end, begin + 32) - begin) * p.predictor_up.stride;
    const char* const rows = static_cast<const char*>(p.predictor_up.data) + begin * p.predictor_up.stride;
    for (int64_t at = threadIdx.x * 128; at < bytes; at += kMlpThreads * 128) PrefetchL2(rows + at);
  }
  WaitForPrevious();
  LetNextStart();
  ClearFinished(p);
  [[maybe_unused]] float early_sums[kScoreRows][1] = {};
  if constexpr (kEarly > 0) {
#pragma unroll
    for (int u = 0; u < kEarly; ++u) {
      const int64_t chunk = lane + 32 * u;
      if (chunk * kMlpChunk < p.R) AddChunks<T, kBits>(early[u], p.projected, chunk, p.R, early_sums);
    }
  }
  int count = 0;
  for (int64_t first = begin; first < end; first += 32) {
    int64_t row[kScoreRows];
    const NeuronRows* weights[kScoreRows];
    uint64_t mask[kScoreRows] = {};
#pragma unroll
    for (int i = 0; i < kScoreRows; ++i) {
      row[i] = min(first + warp * kScoreRows + i, end - 1);
      weights[i] = &p.predictor_up;
    }
    for (int t0 = 0; t0 < p.T; t0 += kTokens) {
      const float* tokens[kTokens];
      PointAtTokens(p.projected, p.projected_stride, t0, p.T, tokens);
      float sums[kScoreRows][kTokens] = {};
      if constexpr (kEarly > 0) {
#pragma unroll
        for (int i = 0; i < kScoreRows; ++i) sums[i][0] = first == begin ? early_sums[i][0] : 0.0f;
        for (int64_t chunk = first == begin ? lane + 32 * kEarly : lane; chunk * kMlpChunk < p.R; chunk += 32) {
          Chunk<T, kBits> loaded[kScoreRows];
#pragma unroll
          for (int i = 0; i < kScoreRows; ++i) loaded[i].template Load<true>(p.predictor_up, row[i], chunk);
          AddChunks<T, kBits>(loaded, tokens[0], chunk, p.R, sums);
        }
      } else {
        AddDots<T, kBits, kVectors, float, kScoreRows, kTokens, 1>(weights, row, tokens, lane, 32, sums);
      }
#pragma unroll
      for (int i = 0; i < kScoreRows; ++i) {
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const float score = SumOverWarp(sums[i][t]);
          if (t0 + t < p.T) mask[i] |= static_cast<uint64_t>(IsActive(p, score, row[i])) << (t0 + t);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kScoreRows; ++i) {
      const int at = warp * kScoreRows + i;
      if (lane == 0) masks[at] = first + at < end ? mask[i] : 0;
    }
    __syncthreads();
    if (warp == 0) AppendActive(p, segment, first + lane, masks[lane], &count);
    __syncthreads();
  }
  if (threadIdx.x == 0 && segment < p.segments) p.counts[segment] = count;
}
static_assert(kMlpWarps * kScoreRows == 32, "the warps of a CTA score 32 neurons");

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_SELECT_CUH_
