// SPDX-License-Identifier: Apache-2.0
// The scores of a predictor for up to 16 tokens, by tensor cores.
#ifndef STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_
#define STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_

#include "cuda/sparse_mlp/select.cuh"
#include "cuda/sparse_mlp/tile.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// The words of a chunk in T, without the scale: integers of eight bits are exact in fp16 and bf16.
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
__device__ __forceinline__ float ScaleOfRow(const MlpRows& factor, int64_t row) {
  return kBits == 0 ? 1.0f : ToFloat(static_cast<const T*>(factor.scales)[row]);
}

constexpr int kProjectTileThreads = 512, kProjectTileWarps = kProjectTileThreads / 32;

// Chunks of a row of predictor_down and of the tokens, all in flight at a time.
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
  __device__ __forceinline__ void Add(float (&sums)[4]) const {
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      uint32_t words[4];
      ToWords<T, kBits>(weights[u], words);
      AddTile<T, kTokens>(words, tokens[u], sums);
    }
  }
};

// projected[t, r] = row r of predictor_down · token t. A CTA a tile of rows; rows from R on give zeros.
template <typename T, int kBits, int kTokens>
__global__ void __launch_bounds__(kProjectTileThreads) ProjectTileKernel(const __grid_constant__ MlpParams p) {
  __shared__ TileSums<1, kTokens, kProjectTileWarps> shared;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t first = int64_t{blockIdx.x} * kTileRows, row = first + lane / 4;
  const MlpRows& factor = p.predictor_down;
  {  // L2 sees what the kernels before still write, so that its lines may be fetched now
    const char* const rows = static_cast<const char*>(factor.data) + first * factor.stride;
    const int64_t bytes = min(int64_t{kTileRows}, p.R - first) * factor.stride;
    for (int64_t at = thread * 128; at < bytes; at += kProjectTileThreads * 128) PrefetchL2(rows + at);
  }
  WaitForPrevious();
  LetNextStart();
  const int64_t chunks = p.K / kMlpChunk;
  ProjectedChunks<T, kBits, kTokens> current, next;
  float sums[1][4] = {};
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
  const int token = thread / kTileRows, own = thread % kTileRows;
  if (token >= p.T) return;
  p.projected[token * p.projected_stride + first + own] =
      first + own < p.R ? ScaleOfRow<T, kBits>(factor, first + own) * shared.Sum(0, token, own) : 0.0f;
}

// Projected values of all tokens, so many of each at a time. A value is fp32: the sum of two numbers in fp16, or of
// three in bf16. Those of a token are scaled by a power of two, so that they do not leave the range of fp16.
template <typename T, int kTokens>
struct ProjectedStorage {
  static constexpr int kValues = kTokens == 8 ? 512 : 256, kParts = kSplitParts<T>;
  alignas(16) T values[kParts][kTokens][kValues + 32];  // eight lanes that read at a time find them in different banks
  float unscales[kTokens];

  // Values [begin, begin + kValues); zeros of tokens and values that do not exist.
  __device__ __forceinline__ void Load(const MlpParams& p, int64_t begin) {
    constexpr int kLoads = kValues / 128;  // of four values, of a lane
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int token = warp; token < kTokens; token += kTileWarps) {
      float x[kLoads][4], most = 0.0f;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int64_t value = begin + (u * 32 + lane) * 4;
        const bool exists = token < p.T && value < p.projected_stride;
        const float4 some =
            __ldcg(reinterpret_cast<const float4*>(p.projected + (exists ? token * p.projected_stride + value : 0)));
        x[u][0] = exists ? some.x : 0.0f, x[u][1] = exists ? some.y : 0.0f;
        x[u][2] = exists ? some.z : 0.0f, x[u][3] = exists ? some.w : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 4 * kLoads; ++i) most = fmaxf(most, fabsf(x[i / 4][i % 4]));
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, offset));
      // 2^10 over the power of two below the largest value; infinity and NaN stay what they are.
      const uint32_t exponent = max(__float_as_uint(most) >> 23, 11u);
      const bool is_scaled = std::is_same<T, __half>::value && exponent < 255;
      const float scale = is_scaled ? __uint_as_float((254 + 10 - exponent) << 23) : 1.0f;
      if (lane == 0) unscales[token] = is_scaled ? __uint_as_float((exponent - 10) << 23) : 1.0f;
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        uint32_t low[kParts], high[kParts];
        SplitPair<T>(scale * x[u][0], scale * x[u][1], low), SplitPair<T>(scale * x[u][2], scale * x[u][3], high);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          *reinterpret_cast<uint2*>(&values[part][token][(u * 32 + lane) * 4]) = make_uint2(low[part], high[part]);
        }
      }
    }
  }
  // sums += tokens · a chunk of the rows, without the scales.
  __device__ __forceinline__ void Add(const uint32_t (&weights)[4], int chunk, float (&sums)[4]) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      TileTokens<T, kTokens> tokens;
#pragma unroll
      for (int n = 0; n < kTokens / 8; ++n) {
        const T* const from = &values[part][static_cast<int>(threadIdx.x) % 32 / 4 + 8 * n][chunk * kMlpChunk];
        const uint4 words = *reinterpret_cast<const uint4*>(from);
        tokens.words[n][0] = words.x, tokens.words[n][1] = words.y;
        tokens.words[n][2] = words.z, tokens.words[n][3] = words.w;
      }
      AddTile<T, kTokens>(weights, tokens, sums);
    }
  }
};

// The neurons of a segment whose scores, predictor_up · projected, make them active. Two warps share a tile's values.
template <typename T, int kBits, int kTokens>
__global__ void __launch_bounds__(kMlpThreads, kTokens == 8 ? 3 : 2)
    ScoreTileKernel(const __grid_constant__ MlpParams p) {
  constexpr int kTiles = 32 / kTileRows, kShares = kTileWarps / kTiles;
  using Projected = ProjectedStorage<T, kTokens>;
  constexpr int kLoaded = Projected::kValues / kMlpChunk / (4 * kShares);  // chunks of a lane
  __shared__ Projected projected;
  __shared__ float scores[kShares][kTokens][32 + 1];
  __shared__ uint64_t masks[kTileWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int tile = warp % kTiles, share = warp / kTiles;
  const int64_t segment = blockIdx.x, begin = segment * p.segment, end = min(p.F, begin + p.segment);
  const MlpRows& factor = p.predictor_up;
  Chunk<T, kBits> weights[kLoaded];
  const auto chunk_of = [&](int u) { return (share + u * kShares) * 4 + lane % 4; };
  const auto load = [&](int64_t neuron, int64_t from) {
#pragma unroll
    for (int u = 0; u < kLoaded; ++u) {
      const int64_t chunk = from / kMlpChunk + chunk_of(u);
      weights[u] = Chunk<T, kBits>();
      if (neuron < end && chunk * kMlpChunk < p.R) weights[u].template Load<true>(factor, neuron, chunk);
    }
  };
  // The projection runs before this kernel, and waited for all others: the weights are there.
  load(begin + tile * kTileRows + lane / 4, 0);
  WaitForPrevious();
  LetNextStart();
  ClearFinished(p);
  int count = 0;
  for (int64_t first = begin; first < end; first += 32) {
    float sums[4] = {};
    for (int64_t from = 0; from < p.R; from += Projected::kValues) {
      if (first != begin || from != 0) load(first + tile * kTileRows + lane / 4, from);
      if (first == begin || p.R > Projected::kValues) {
        __syncthreads();
        projected.Load(p, from);
        __syncthreads();
      }
      float scaled[4] = {};
#pragma unroll
      for (int u = 0; u < kLoaded; ++u) {
        if (from + (share + u * kShares) * 4 * kMlpChunk >= p.R) continue;
        uint32_t words[4];
        ToWords<T, kBits>(weights[u], words);
        projected.Add(words, chunk_of(u), scaled);
      }
#pragma unroll
      for (int i = 0; i < kTokens / 4; ++i)
        sums[i] = fmaf(projected.unscales[lane / 4 + i / 2 * 8], scaled[i], sums[i]);
    }
#pragma unroll
    for (int i = 0; i < kTokens / 4; ++i) {
      scores[share][lane / 4 + i / 2 * 8][tile * kTileRows + lane % 4 * 2 + i % 2] = sums[i];
    }
    __syncthreads();
    const int64_t neuron = first + lane;
    uint64_t mask = 0;
    if (neuron < end) {
      const float scale = ScaleOfRow<T, kBits>(factor, neuron);
      for (int t = warp; t < p.T; t += kTileWarps) {
        float score = scores[0][t][lane];
#pragma unroll
        for (int i = 1; i < kShares; ++i) score += scores[i][t][lane];
        mask |= static_cast<uint64_t>(IsActive(p, scale * score, neuron)) << t;
      }
    }
    masks[warp][lane] = mask;
    __syncthreads();
    if (warp != 0) continue;
#pragma unroll
    for (int w = 1; w < kTileWarps; ++w) mask |= masks[w][lane];
    if (p.all_masks == nullptr) {
      AppendActive(p, segment, neuron, mask, &count);
    } else if (neuron < end) {
      p.all_masks[neuron] = mask;
    }
  }
  if (threadIdx.x == 0 && segment < p.segments && p.all_masks == nullptr) p.counts[segment] = count;
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_SELECT_TILE_CUH_
