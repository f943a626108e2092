// SPDX-License-Identifier: Apache-2.0
// The scores of a predictor for up to 16 tokens, by tensor cores.
#ifndef STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_
#define STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_

#include "cuda/sparse_mlp/select.cuh"
#include "cuda/sparse_mlp/tile.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// The words of a chunk in T, without its scale. Quantized values minus 128 are exact in fp16 and bf16.
template <typename T, int kBits>
__device__ __forceinline__ void ToWords(const Chunk<T, kBits>& chunk, uint32_t (&words)[4]) {
  if constexpr (kBits == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = chunk.words[i];
  } else {
    float values[kMlpChunk];
    chunk.Unscaled(values);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Pack<T>(values[2 * i], values[2 * i + 1]);
  }
}

template <typename T, int kBits>
__device__ __forceinline__ float ScaleOfRow(const NeuronRows& factor, int64_t row) {
  return kBits == 0 ? 1.0f : ToFloat(reinterpret_cast<const T*>(factor.scales)[row]);
}

constexpr int kProjectTileThreads = 512, kProjectTileWarps = kProjectTileThreads / 32;

// Chunks of a tile of rows of predictor_down, and of the tokens, that a lane loads at a time.
template <typename T, int kBits, int kTokens>
struct ProjectedChunks {
  static constexpr int kLoaded = 4, kStep = kLoaded * 4 * kProjectTileWarps;
  Chunk<T, kBits> weights[kLoaded];
  TileTokens<T, kTokens> tokens[kLoaded];

  __device__ __forceinline__ void Load(const MlpParams& p, int64_t row, int64_t begin, int64_t chunks) {
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      const int64_t chunk = begin + (u * kProjectTileWarps + threadIdx.x / 32) * 4 + threadIdx.x % 4;
      weights[u] = Chunk<T, kBits>();
      if (row < p.R && chunk < chunks) weights[u].template Load<true>(p.predictor_down, row, chunk);
      tokens[u].Load(p, chunk, chunks);
    }
  }
  __device__ __forceinline__ void Add(float (&sums)[kTokenTiles<kTokens>][4]) const {
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      uint32_t words[4];
      ToWords<T, kBits>(weights[u], words);
      AddTile<T, kTokens>(words, tokens[u], sums);
    }
  }
};

// projected[t, r] = row r of predictor_down · token t. A CTA has a tile of rows; rows from R on give zeros.
template <typename T, int kBits, int kTokens>
__global__ void __launch_bounds__(kProjectTileThreads, 1) ProjectTileKernel(const __grid_constant__ MlpParams p) {
  __shared__ TileSums<1, kTokens, kProjectTileWarps> shared;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t first = int64_t{blockIdx.x} * kTileRows;
  const NeuronRows& factor = p.predictor_down;
  {  // before the wait: later writes reach L2, so that a prefetched line is never stale
    const char* const rows = static_cast<const char*>(factor.data) + first * factor.stride;
    const int64_t bytes = min(int64_t{kTileRows}, p.R - first) * factor.stride;
    for (int64_t at = thread * 128; at < bytes; at += kProjectTileThreads * 128) PrefetchL2(rows + at);
  }
  WaitForPrevious();
  LetNextStart();
  const int64_t chunks = p.K / kMlpChunk, row = first + lane / 4;
  ProjectedChunks<T, kBits, kTokens> current, next;
  float sums[1][kTokenTiles<kTokens>][4] = {};
  current.Load(p, row, 0, chunks);
  // Not unrolled: ptxas moves loads down to their first use, but not out of the turn of a loop.
#pragma unroll 1
  for (int64_t begin = 0; begin < chunks; begin += current.kStep) {
    next.Load(p, row, begin + current.kStep, chunks);
    current.Add(sums[0]);
    current = next;
  }
  shared.Store(sums);
  __syncthreads();
  for (int i = thread; i < kTokens * kTileRows; i += kProjectTileThreads) {
    const int64_t token = i / kTileRows, own = first + i % kTileRows;
    if (token >= p.T || own >= p.projected_stride) continue;
    const float sum = shared.Sum(0, i / kTileRows, i % kTileRows);
    p.projected[token * p.projected_stride + own] =
        own < p.R ? ActivatedProjection(p, ScaleOfRow<T, kBits>(factor, own) * sum) : 0.0f;
  }
}

// Shared memory that stages kValues projected values of each token. A value is fp32: the sum of two terms in
// fp16, or of three in bf16. In fp16 a power of two scales those of a token, so that they stay in the range of fp16.
template <typename T, int kTokens>
struct StagedProjection {
  static constexpr int kValues = kTokens == 8 ? 512 : 256, kTerms = kFp32Terms<T>;
  alignas(16) T values[kTerms][kTokens][kValues + 32];  // padded: eight lanes read from different banks
  float inverse_scales[kTokens];

  // Values [begin, begin + kValues); zeros of tokens and values that do not exist.
  __device__ __forceinline__ void Load(const MlpParams& p, int64_t begin) {
    constexpr int kLoads = kValues / 128;  // of four values, of a lane
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int token = warp; token < kTokens; token += kMlpWarps) {
      float x[kLoads][4], largest = 0.0f;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int64_t value = begin + (u * 32 + lane) * 4;
        const bool exists = token < p.T && value < p.projected_stride;
        const int64_t at = exists ? token * p.projected_stride + value : 0;
        const float4 some = __ldcg(reinterpret_cast<const float4*>(p.projected + at));
        x[u][0] = exists ? some.x : 0.0f, x[u][1] = exists ? some.y : 0.0f;
        x[u][2] = exists ? some.z : 0.0f, x[u][3] = exists ? some.w : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 4 * kLoads; ++i) largest = fmaxf(largest, fabsf(x[i / 4][i % 4]));
      // Scores with an infinite or NaN value are NaN: active.
      const TermScale<T> scale(MaxOverWarp(largest));
      if (lane == 0) inverse_scales[token] = scale.inverse;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        uint32_t low[kTerms], high[kTerms];
        DecomposePair<T>(scale.factor * x[u][0], scale.factor * x[u][1], low);
        DecomposePair<T>(scale.factor * x[u][2], scale.factor * x[u][3], high);
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          *reinterpret_cast<uint2*>(&values[term][token][(u * 32 + lane) * 4]) = make_uint2(low[term], high[term]);
        }
      }
    }
  }
  // sums += tokens · a chunk of the rows, without the scales.
  __device__ __forceinline__ void Add(const uint32_t (&weights)[4], int chunk, float (&sums)[1][4]) const {
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
      TileTokens<T, kTokens> tokens;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        const T* const from = &values[term][static_cast<int>(threadIdx.x) % 32 / 4 + 8 * n][chunk * kMlpChunk];
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        tokens.words[n][0] = words.x, tokens.words[n][1] = words.y;
        tokens.words[n][2] = words.z, tokens.words[n][3] = words.w;
      }
      AddTile<T, kTokens>(weights, tokens, sums);
    }
  }
};

// The scores of 32 neurons and kTokens tokens. A tile of eight neurons has kRankSplits warps, which split its values.
template <typename T, int kBits, int kTokens>
class ScoreTiles {
 public:
  using Projected = StagedProjection<T, kTokens>;
  static constexpr int kTiles = 32 / kTileRows, kRankSplits = kMlpWarps / kTiles;
  using Scores = float[kRankSplits][kTokens][32 + 1];

  __device__ __forceinline__ ScoreTiles(const MlpParams& params, Projected& projected, Scores& scores)
      : p_(params),
        lane_(static_cast<int>(threadIdx.x) % 32),
        tile_(static_cast<int>(threadIdx.x) / 32 % kTiles),
        rank_split_(static_cast<int>(threadIdx.x) / 32 / kTiles),
        projected_(projected),
        scores_(scores) {}

  // Rows of neurons [first, end), at most 32; values [from, from + Projected::kValues).
  __device__ __forceinline__ void LoadWeights(int64_t first, int64_t end, int64_t from) {
    const int64_t neuron = first + tile_ * kTileRows + lane_ / 4;
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      const int64_t chunk = from / kMlpChunk + ChunkOf(u);
      weights_[u] = Chunk<T, kBits>();
      if (neuron < end && chunk * kMlpChunk < p_.R) weights_[u].template Load<true>(p_.predictor_up, neuron, chunk);
    }
  }
  // The caller's barrier: all threads have read the projected values of the step before.
  __device__ __forceinline__ void LoadTokens(int64_t from) {
    projected_.Load(p_, from);
    __syncthreads();
  }
  __device__ __forceinline__ void Clear() { sums_[0] = sums_[1] = sums_[2] = sums_[3] = 0.0f; }
  // Adds the staged values, which begin at value `from`, to the scores.
  __device__ __forceinline__ void Add(int64_t from) {
    float scaled[1][4] = {};
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      if (from + (rank_split_ + u * kRankSplits) * 4 * kMlpChunk >= p_.R) continue;
      uint32_t words[4];
      ToWords<T, kBits>(weights_[u], words);
      projected_.Add(words, ChunkOf(u), scaled);
    }
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      sums_[i] = fmaf(projected_.inverse_scales[lane_ / 4 + i / 2 * 8], scaled[0][i], sums_[i]);
    }
  }
  // Ends with a barrier: all scores are then in shared memory.
  __device__ __forceinline__ void Store() {
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      scores_[rank_split_][lane_ / 4 + i / 2 * 8][tile_ * kTileRows + lane_ % 4 * 2 + i % 2] = sums_[i];
    }
    __syncthreads();
  }
  // Whether a neuron is active for a token of the group. neuron = first + this lane.
  __device__ __forceinline__ bool IsNeeded(int64_t neuron, float scale, int token) const {
    float score = scores_[0][token][lane_];
#pragma unroll
    for (int i = 1; i < kRankSplits; ++i) score += scores_[i][token][lane_];
    return IsActive(p_, scale * score, neuron);
  }

 private:
  static constexpr int kLoaded = Projected::kValues / kMlpChunk / (4 * kRankSplits);  // chunks of a lane
  __device__ __forceinline__ int ChunkOf(int u) const { return (rank_split_ + u * kRankSplits) * 4 + lane_ % 4; }

  const MlpParams& p_;
  const int lane_, tile_, rank_split_;
  Projected& projected_;
  Scores& scores_;
  Chunk<T, kBits> weights_[kLoaded];
  float sums_[4];
};

// The neurons of a segment whose scores, predictor_up · projected, make them active.
template <typename T, int kBits, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, kTokens == 8 ? 3 : 2)
    ScoreTileKernel(const __grid_constant__ MlpParams p) {
  using Tiles = ScoreTiles<T, kBits, kTokens>;
  constexpr int kStagedValues = Tiles::Projected::kValues;
  __shared__ typename Tiles::Projected projected;
  __shared__ typename Tiles::Scores scores;
  __shared__ uint64_t masks[kMlpWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t segment = blockIdx.x, begin = segment * p.segment, end = min(p.F, begin + p.segment);
  Tiles tiles(p, projected, scores);
  // The projection runs before this kernel, and waited for all others: the weights are there.
  tiles.LoadWeights(begin, end, 0);
  WaitForPrevious();
  LetNextStart();
  ClearFinished(p);
  int count = 0;
  for (int64_t first = begin; first < end; first += 32) {
    tiles.Clear();
    for (int64_t from = 0; from < p.R; from += kStagedValues) {
      const bool is_first = first == begin && from == 0;
      if (!is_first) tiles.LoadWeights(first, end, from);
      if (!is_first && p.R > kStagedValues) __syncthreads();
      if (is_first || p.R > kStagedValues) tiles.LoadTokens(from);
      tiles.Add(from);
    }
    tiles.Store();
    const int64_t neuron = first + lane;
    uint64_t mask = 0;
    if (neuron < end) {
      const float scale = ScaleOfRow<T, kBits>(p.predictor_up, neuron);
      for (int t = warp; t < p.T; t += kMlpWarps) {
        mask |= static_cast<uint64_t>(tiles.IsNeeded(neuron, scale, t)) << t;
      }
    }
    masks[warp][lane] = mask;
    __syncthreads();
    if (warp != 0) continue;
#pragma unroll
    for (int w = 1; w < kMlpWarps; ++w) mask |= masks[w][lane];
    AppendActive(p, segment, neuron, mask, &count);
  }
  if (threadIdx.x == 0 && segment < p.segments) p.counts[segment] = count;
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_
