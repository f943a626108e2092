// SPDX-License-Identifier: Apache-2.0
// Dot products of a tile of eight weight rows with several tokens, by tensor cores.
//
// mma.m16n8k16 multiplies [16 tokens, 16 values] by [16 values, 8 rows]. A dot product may take its values in any
// order, so each lane loads chunks of eight contiguous values: lane 4 g + q has chunk q of row g, of token g and of
// token g + 8. The four words of a chunk are the operands of two instructions, and no operand moves between lanes.
#ifndef STOF_CUDA_SPARSE_MLP_TILE_CUH_
#define STOF_CUDA_SPARSE_MLP_TILE_CUH_

#include "cuda/common/round.cuh"
#include "cuda/sparse_mlp/rows.cuh"

namespace stof {
namespace cuda {
namespace mlp {

constexpr int kTileRows = 8;

// Tiles of 16 tokens. With 8 tokens, the upper half of the only one is zeros.
template <int kTokens>
constexpr int kTokenTiles = (kTokens + 15) / 16;

// One chunk of each token of a lane; zeros where the token or the chunk does not exist.
template <typename T, int kTokens>
struct TileTokens {
  static_assert(sizeof(T) == 2, "words of two values");
  static constexpr int kOwn = kTokens / 8;  // tokens of a lane
  uint32_t words[kOwn][4];

  __device__ __forceinline__ void Load(const MlpParams& p, int64_t chunk, int64_t chunks) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int64_t token = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][w] = 0;
      if (token >= p.T || chunk >= chunks) continue;
      LoadCached(words[i], static_cast<const T*>(p.input) + token * p.K + chunk * kMlpChunk);
    }
  }
};

// sums += tokens · a chunk of the rows. In each tile of tokens, elements 0 and 1 have token g and rows 2 q and 2 q + 1,
// elements 2 and 3 have token g + 8.
template <typename T, int kTokens>
__device__ __forceinline__ void AddTile(const uint32_t (&weights)[4], const TileTokens<T, kTokens>& tokens,
                                        float (&sums)[kTokenTiles<kTokens>][4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
#pragma unroll
    for (int n = 0; n < kTokenTiles<kTokens>; ++n) {
      uint32_t a[4] = {tokens.words[2 * n][i], 0, tokens.words[2 * n][i + 1], 0};
      if constexpr (kTokens > 8) a[1] = tokens.words[2 * n + 1][i], a[3] = tokens.words[2 * n + 1][i + 1];
      Mma<T>(sums[n], a, weights[i], weights[i + 1]);
    }
  }
}

// An fp32 value is the sum of so many terms in T, which tensor cores multiply. In fp16 the sum of the terms is a
// multiple of 2^-24, to which small values are rounded.
template <typename T>
constexpr int kFp32Terms = std::is_same<T, __half>::value ? 2 : kMostTerms;

// terms[i] has term i of x and y in one word. The second term of infinity, or of a value too large for T, is infinite
// or NaN: so are sums with it.
template <typename T>
__device__ __forceinline__ void DecomposePair(float x, float y, uint32_t (&terms)[kFp32Terms<T>]) {
#pragma unroll
  for (int term = 0; term < kFp32Terms<T>; ++term) {
    terms[term] = Pack<T>(x, y);
    x -= ToFloat(Round<T>(x)), y -= ToFloat(Round<T>(y));
  }
}

// A power of two that scales fp32 values before they become terms, so that fp16 holds them: the largest magnitude
// comes to lie between 2^10 and 2^11. 1 in bf16, and where it is infinite.
template <typename T>
struct TermScale {
  float factor = 1.0f, inverse = 1.0f;
  __device__ __forceinline__ explicit TermScale(float largest) {
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, 11u);
    if (!std::is_same<T, __half>::value || exponent >= 255) return;
    factor = __uint_as_float((254 + 10 - exponent) << 23), inverse = __uint_as_float((exponent - 10) << 23);
  }
};

// Shared memory in which the sums of the warps are added: each warp has a part of the values of a tile's rows.
template <int kWeights, int kTokens, int kWarps = kMlpWarps>
struct TileSums {
  alignas(16) float values[kWarps][kWeights][kTokens][kTileRows];

  __device__ __forceinline__ void Store(const float (&sums)[kWeights][kTokenTiles<kTokens>][4]) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int w = 0; w < kWeights; ++w) {
#pragma unroll
      for (int i = 0; i < kTokens / 8; ++i) {
        *reinterpret_cast<float2*>(&values[warp][w][lane / 4 + 8 * i][lane % 4 * 2]) =
            make_float2(sums[w][i / 2][i % 2 * 2], sums[w][i / 2][i % 2 * 2 + 1]);
      }
    }
  }
  __device__ __forceinline__ float Sum(int weight, int token, int row) const {
    float sum = values[0][weight][token][row];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) sum += values[warp][weight][token][row];
    return sum;
  }
};

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_TILE_CUH_
