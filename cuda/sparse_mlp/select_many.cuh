// SPDX-License-Identifier: Apache-2.0
// The neurons that a predictor selects for more than 16 tokens, by three kernels. Two use tensor cores.
//
//   project:  partials = input · predictor_down^T, where K is split
//   terms:    the sums of the splits in fp32, each decomposed into terms in fp16 or bf16
//   score:    terms · predictor_up^T; a bit for each token and neuron: its score is above the threshold
#ifndef STOF_CUDA_SPARSE_MLP_SELECT_MANY_CUH_
#define STOF_CUDA_SPARSE_MLP_SELECT_MANY_CUH_

#include <algorithm>

#include "cuda/gemm/sm80.cuh"
#include "cuda/sparse_mlp/select_tile.cuh"

namespace stof {
namespace cuda {
namespace mlp {

// A CTA has 2 x 2 warps, of so many tokens and rows each.
constexpr int kManyThreads = 128, kWarpTokens = kManyTokens / 2, kWarpRows = kManyRows / 2;

// Dot products of kManyTokens tokens, each a sum of kTerms terms, and kManyRows rows of a factor.
template <typename T, int kTerms, bool kVectors>
class DotTiles {
 public:
  // [tokens / 16][rows / 8]: elements 0 and 1 have token lane / 4 and rows 2 (lane % 4) and one more, elements 2 and 3
  // have token lane / 4 + 8.
  using Sums = float[kWarpTokens / 16][kWarpRows / 8][4];
  struct Operands {
    const T* tokens = nullptr;  // [kTerms, token_count, token_stride]
    const T* rows = nullptr;    // [row_count, row_stride]
    int64_t token_count = 0, token_stride = 0, row_count = 0, row_stride = 0;
  };
  static constexpr int kDepth = 32, kStages = 4;  // values of a step; steps in shared memory
  static constexpr uint32_t kTokenBytes = kManyTokens * kDepth * 2, kRowBytes = kManyRows * kDepth * 2;
  static constexpr uint32_t kStageBytes = kTerms * kTokenBytes + kRowBytes;
  static constexpr int kSharedBytes = static_cast<int>(kStages * kStageBytes);
  // CTAs that the registers and the 228 KiB of shared memory of an SM hold.
  static constexpr int kCtasOfAnSm = std::min(3, 228 * 1024 / (kSharedBytes + 1024));

  // Values [begin, end) of the dot products; begin is a multiple of 8.
  __device__ __forceinline__ DotTiles(const Operands& operands, uint32_t shared, int64_t first_token, int64_t first_row,
                                      int begin, int end)
      : shared_(shared),
        first_token_(first_token),
        first_row_(first_row),
        begin_(begin + 8 * Piece()),
        end_(end),
        steps_((end - begin + kDepth - 1) / kDepth),
        term_stride_(operands.token_count * operands.token_stride) {
#pragma unroll
    for (int i = 0; i < kTokenCopies; ++i) {
      const int64_t token = first_token + CopiedRow() + i * kCopiedRows;
      has_token_[i] = token < operands.token_count;
      tokens_[i] = operands.tokens + (has_token_[i] ? token : 0) * operands.token_stride;
    }
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int64_t row = first_row + CopiedRow() + i * kCopiedRows;
      has_row_[i] = row < operands.row_count;
      rows_[i] = operands.rows + (has_row_[i] ? row : 0) * operands.row_stride;
    }
  }

  // This lane's first token and row.
  __device__ __forceinline__ int64_t Token() const { return first_token_ + WarpToken() + Lane() / 4; }
  __device__ __forceinline__ int64_t Row() const { return first_row_ + WarpRow() + Lane() % 4 * 2; }

  __device__ __forceinline__ void Add(Sums& sums) const {
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) {
      if (s < steps_) Copy(s, s);
      CommitCopies();
    }
    int stage = 0, next = kStages - 1;  // of this step, and of the one that is copied
    for (int step = 0; step < steps_; ++step) {
      WaitCopies<kStages - 2>();
      __syncthreads();
      if (step + kStages - 1 < steps_) Copy(step + kStages - 1, next);
      CommitCopies();
      Multiply(stage, sums);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      next = next + 1 == kStages ? 0 : next + 1;
    }
    WaitCopies<0>();
  }

 private:
  static constexpr int kPieces = kDepth / 8, kCopiedRows = kManyThreads / kPieces;  // at once, of 16 bytes
  static constexpr int kTokenCopies = kManyTokens / kCopiedRows, kRowCopies = kManyRows / kCopiedRows;

  static __device__ __forceinline__ int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __device__ __forceinline__ int WarpToken() { return static_cast<int>(threadIdx.x) / 32 % 2 * kWarpTokens; }
  static __device__ __forceinline__ int WarpRow() { return static_cast<int>(threadIdx.x) / 64 * kWarpRows; }
  static __device__ __forceinline__ int CopiedRow() { return static_cast<int>(threadIdx.x) / kPieces; }
  static __device__ __forceinline__ int Piece() { return static_cast<int>(threadIdx.x) % kPieces; }

  // kCopiedRows is a multiple of 8: the swizzle, which depends on the row modulo 8, is the same for all copies of a
  // thread.
  __device__ __forceinline__ void Copy(int step, int stage) const {
    const int value = begin_ + step * kDepth;
    const bool is_inside = value < end_;
    uint32_t to = shared_ + static_cast<uint32_t>(stage) * kStageBytes + gemm80::PlaceA(CopiedRow(), Piece());
#pragma unroll
    for (int term = 0; term < kTerms; ++term) {
#pragma unroll
      for (int i = 0; i < kTokenCopies; ++i) {
        CopyPiece(to + i * kCopiedRows * kDepth * 2, tokens_[i] + term * term_stride_, has_token_[i] && is_inside,
                  value);
      }
      to += kTokenBytes;
    }
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      CopyPiece(to + i * kCopiedRows * kDepth * 2, rows_[i], has_row_[i] && is_inside, value);
    }
  }
  __device__ __forceinline__ void CopyPiece(uint32_t to, const T* row, bool is_inside, int value) const {
    if constexpr (kVectors) {
      CopyAsync16(to, row + (is_inside ? value : 0), is_inside);
    } else {
      gemm80::Bring<false>(to, row, 0, is_inside, value, end_);
    }
  }

  __device__ __forceinline__ void Multiply(int stage, Sums& sums) const {
    const int lane = Lane();
    const uint32_t stage_at = shared_ + static_cast<uint32_t>(stage) * kStageBytes;
    const uint32_t tokens = stage_at + gemm80::PlaceA(WarpToken() + lane % 16, lane / 16);
    const uint32_t rows =
        stage_at + kTerms * kTokenBytes + gemm80::PlaceA(WarpRow() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {  // bit 5 of an address selects the half of a step, also with the swizzle
      uint32_t b[kWarpRows / 16][4];
#pragma unroll
      for (int j = 0; j < kWarpRows / 16; ++j) LoadMatrix4(b[j], (rows ^ 2 * k) + 16 * kDepth * 2 * j);
      constexpr int kTokenTiles = kWarpTokens / 16;
      uint32_t a[kTerms * kTokenTiles][4];  // all of them before the first is used: their latencies overlap
#pragma unroll
      for (int i = 0; i < kTerms * kTokenTiles; ++i) {
        LoadMatrix4(a[i], (tokens ^ 2 * k) + i / kTokenTiles * kTokenBytes + 16 * kDepth * 2 * (i % kTokenTiles));
      }
#pragma unroll
      for (int i = 0; i < kTerms * kTokenTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kWarpRows / 8; ++j) {
          Mma<T>(sums[i % kTokenTiles][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  const uint32_t shared_;
  const int64_t first_token_, first_row_;
  const int begin_, end_, steps_;  // begin_: of this thread's copies
  const int64_t term_stride_;
  const T *tokens_[kTokenCopies], *rows_[kRowCopies];
  bool has_token_[kTokenCopies], has_row_[kRowCopies];
};

template <typename T, bool kVectors>
using ProjectManyTiles = DotTiles<T, 1, kVectors>;
template <typename T, bool kVectors>
using ScoreManyTiles = DotTiles<T, kFp32Terms<T>, kVectors>;

// partials[split] = the dot products over a split of K. Rows from R on give zeros.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kManyThreads, ProjectManyTiles<T, kVectors>::kCtasOfAnSm)
    ProjectManyKernel(const __grid_constant__ MlpSelectManyParams p) {
  using Tiles = ProjectManyTiles<T, kVectors>;
  extern __shared__ __align__(128) uint8_t shared[];
  WaitForPrevious();
  LetNextStart();
  // In 32 bits, which count all CTAs: a division of 64 bits takes a hundred instructions.
  const auto row_tiles = static_cast<uint32_t>((p.projected_stride + kManyRows - 1) / kManyRows);
  const auto token_tiles = static_cast<uint32_t>((p.T + kManyTokens - 1) / kManyTokens);
  const uint32_t tile = blockIdx.x % (row_tiles * token_tiles);
  const int64_t split = blockIdx.x / (row_tiles * token_tiles);
  typename Tiles::Operands operands;
  operands.tokens = static_cast<const T*>(p.input), operands.token_count = p.T, operands.token_stride = p.K;
  operands.rows = static_cast<const T*>(p.predictor_down), operands.row_count = p.R, operands.row_stride = p.K;
  const int64_t begin = min(p.K, split * p.split_values), end = min(p.K, begin + p.split_values);
  const Tiles tiles(operands, SharedAddress(shared), int64_t{tile / row_tiles} * kManyTokens,
                    int64_t{tile % row_tiles} * kManyRows, static_cast<int>(begin), static_cast<int>(end));
  typename Tiles::Sums sums = {};
  tiles.Add(sums);
  float* const partials = p.partials + split * p.T * p.projected_stride;
#pragma unroll
  for (int i = 0; i < kWarpTokens / 8; ++i) {
    const int64_t token = tiles.Token() + 8 * i;
#pragma unroll
    for (int j = 0; j < kWarpRows / 8; ++j) {
      const int64_t row = tiles.Row() + 8 * j;
      if (token >= p.T || row >= p.projected_stride) continue;
      *reinterpret_cast<float2*>(partials + token * p.projected_stride + row) =
          make_float2(sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1]);
    }
  }
}

// A CTA decomposes the projected values of one token. In fp16 a power of two scales them into range; inverse_scales
// keeps its inverse.
template <typename T>
__global__ void __launch_bounds__(kManyThreads) TermsManyKernel(const __grid_constant__ MlpSelectManyParams p) {
  __shared__ float max_of_warps[kManyThreads / 32];
  WaitForPrevious();
  LetNextStart();
  const int64_t token = blockIdx.x, first = int64_t{4} * threadIdx.x, step = int64_t{4} * kManyThreads;
  float* const sums = p.partials + token * p.projected_stride;
  float largest = 0.0f;
  for (int64_t r = first; r < p.projected_stride; r += step) {
    float x[4] = {};
#pragma unroll 8
    for (int split = 0; split < p.splits; ++split) {
      const float4 part = *reinterpret_cast<const float4*>(sums + split * p.T * p.projected_stride + r);
      x[0] += part.x, x[1] += part.y, x[2] += part.z, x[3] += part.w;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p.down_scales != nullptr && r + i < p.R) x[i] *= ToFloat(static_cast<const T*>(p.down_scales)[r + i]);
      x[i] = ActivatedProjection(p, x[i]);
      largest = fmaxf(largest, fabsf(x[i]));
    }
    *reinterpret_cast<float4*>(sums + r) =
        make_float4(x[0], x[1], x[2], x[3]);  // in the place of split 0; this thread reads them again
  }
  largest = MaxOverWarp(largest);
  if (threadIdx.x % 32 == 0) max_of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kManyThreads / 32; ++warp) largest = fmaxf(largest, max_of_warps[warp]);
  const TermScale<T> scale(largest);
  if (threadIdx.x == 0) p.inverse_scales[token] = scale.inverse;
  for (int64_t r = first; r < p.projected_stride; r += step) {
    const float4 x = *reinterpret_cast<const float4*>(sums + r);
    uint32_t low[kFp32Terms<T>], high[kFp32Terms<T>];
    DecomposePair<T>(scale.factor * x.x, scale.factor * x.y, low);
    DecomposePair<T>(scale.factor * x.z, scale.factor * x.w, high);
#pragma unroll
    for (int term = 0; term < kFp32Terms<T>; ++term) {
      T* const to = static_cast<T*>(p.terms) + (term * p.T + token) * p.projected_stride + r;
      *reinterpret_cast<uint2*>(to) = make_uint2(low[term], high[term]);
    }
  }
}

// masks[token, neuron / 32]: bit neuron % 32 says whether the neuron is active for the token.
template <typename T, bool kVectors>
__global__ void __launch_bounds__(kManyThreads, ScoreManyTiles<T, kVectors>::kCtasOfAnSm)
    ScoreManyKernel(const __grid_constant__ MlpSelectManyParams p) {
  using Tiles = ScoreManyTiles<T, kVectors>;
  extern __shared__ __align__(128) uint8_t shared[];
  WaitForPrevious();
  LetNextStart();
  const auto row_tiles = static_cast<uint32_t>((p.F + kManyRows - 1) / kManyRows);
  typename Tiles::Operands operands;
  operands.tokens = static_cast<const T*>(p.terms), operands.token_count = p.T;
  operands.token_stride = p.projected_stride;
  operands.rows = static_cast<const T*>(p.predictor_up), operands.row_count = p.F, operands.row_stride = p.R;
  const Tiles tiles(operands, SharedAddress(shared), int64_t{blockIdx.x / row_tiles} * kManyTokens,
                    int64_t{blockIdx.x % row_tiles} * kManyRows, 0, static_cast<int>(p.R));
  typename Tiles::Sums sums = {};
  tiles.Add(sums);

  constexpr int kOwnTokens = kWarpTokens / 8, kWords = kWarpRows / 32;
  float inverse_scales[kOwnTokens];
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    const int64_t token = tiles.Token() + 8 * i;
    inverse_scales[i] = token < p.T && p.R > 0 ? p.inverse_scales[token] : 1.0f;
  }
  uint32_t words[kOwnTokens][kWords] = {};
#pragma unroll
  for (int j = 0; j < kWarpRows / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int64_t neuron = tiles.Row() + 8 * j + e;
      if (neuron >= p.F) continue;
      const float scale = p.up_scales == nullptr ? 1.0f : ToFloat(static_cast<const T*>(p.up_scales)[neuron]);
      const float threshold = p.threshold[p.threshold_stride == 0 ? 0 : neuron];
      const uint32_t bit = 1u << (j % 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e);
#pragma unroll
      for (int i = 0; i < kOwnTokens; ++i) {
        const float score = scale * (inverse_scales[i] * sums[i / 2][j][i % 2 * 2 + e]);
        if (IsAbove(score, threshold)) words[i][j / 4] |= bit;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnTokens; ++i) {
    const int64_t token = tiles.Token() + 8 * i;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t word = words[i][w];
      word |= __shfl_xor_sync(kAllLanes, word, 1);
      word |= __shfl_xor_sync(kAllLanes, word, 2);
      const int64_t at = tiles.Row() / 32 + w;
      if (threadIdx.x % 4 == 0 && token < p.T && at < p.mask_words) p.masks[token * p.mask_words + at] = word;
    }
  }
}

}  // namespace mlp
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_SPARSE_MLP_SELECT_MANY_CUH_
