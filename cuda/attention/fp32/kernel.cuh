// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention of fp32 tensors on fp16 tensor cores, compute capability 8.0 and later. A number is the sum of
// two fp16 values, high + low, with 22 bits of mantissa. A product takes three matmuls: high * high, high * low, low *
// high (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores"). fp16 has twice the rate of
// TF32. Its small range does no harm: queries and keys are scaled by a power of two a row, values a tile, and weights
// are in 0 ... 2^8.
//
// Keys and values are split once, by a kernel before this one (cuda/attention/fp32/split_operands.cuh), since every
// tile row reads them. Tensor cores round sums towards zero, and the error would grow with the number of keys: P V of
// each tile starts from zero and is added to the output in fp32 arithmetic.
//
// With allow_tf32 one matmul of the high parts takes the place of three: 11 bits of mantissa, as TF32 has, at twice its
// rate.
//
// With kRelative, scores have relative terms (cuda/attention/relative/).
#ifndef STOF_CUDA_ATTENTION_FP32_KERNEL_CUH_
#define STOF_CUDA_ATTENTION_FP32_KERNEL_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/attention/far_scores.cuh"
#include "cuda/attention/fp32/api.h"
#include "cuda/attention/fp32/shape.cuh"
#include "cuda/attention/lse.cuh"
#include "cuda/attention/score_bias.cuh"
#include "cuda/attention/tile_iterator.cuh"
#include "cuda/mask/tile_bits.cuh"

namespace stof {
namespace cuda {

// The work of one CTA.
template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
class Fp32Attention : private RelativeParamsOf<kRelative> {
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  static constexpr int kColumns = S::kN / 8;              // blocks of 8 keys
  static constexpr int kOutputs = kHead / 8;              // blocks of 8 output elements
  static constexpr int kSteps = kHead / 16;               // k-steps of 16 of Q Kᵀ
  static constexpr int kGroup = S::kBlocks == 1 ? 4 : 2;  // blocks of columns that are computed at once

 public:
  __device__ Fp32Attention(const Fp32Params& params, const RelativeParamsOf<kRelative>& relative, int stages,
                           int l2_heads, char* shared)
      : RelativeParamsOf<kRelative>(relative), params_(params), p_(params.attention), stages_(stages), shared_(shared) {
    // L2 head groups one after the other; in each, the longest tile rows of all heads first.
    const int tile_rows = (p_.S + kTileRows - 1) / kTileRows;
    const int sub_tile = blockIdx.x % S::kCtasPerTile, item = blockIdx.x / S::kCtasPerTile;
    const int first = item / (tile_rows * l2_heads) * l2_heads;
    const int heads = min(l2_heads, p_.B * p_.H - first);
    const int rest = item - first * tile_rows;
    const int bh = first + rest % heads;
    int row = rest / heads;
    b_ = bh / p_.H;
    h_ = bh % p_.H;
    tiles_ = (p_.T + S::kN - 1) / S::kN;
    if (p_.has_mask != 0) {
      const DeviceMask& mask = p_.mask;
      const int table = mask.layout[(mask.layout_b == 1 ? 0 : b_) * mask.layout_h + (mask.layout_h == 1 ? 0 : h_)];
      row = mask.order[table * mask.rows + row];
      const int at = table * mask.rows + row;
      begin_ = mask.row_ptr[at];
      full_ = mask.full_begin[at];
      end_ = mask.row_end[at];
    } else {
      end_ = tiles_;
    }
    tile_row0_ = sub_tile * S::kM;
    row0_ = row * kTileRows + tile_row0_;
    group_ = static_cast<int64_t>(b_) * p_.G + h_ / (p_.H / p_.G);
    pad_ = p_.pad_bits == nullptr ? nullptr : p_.pad_bits + static_cast<int64_t>(b_) * tiles_ * 2;
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
  }

  __device__ void Run() {
    if (row0_ >= p_.S) return;
    LoadQueries();
    const auto policy = static_cast<EmptyRows>(p_.empty_rows);
    const bool second_pass = policy == EmptyRows::kMean || policy == EmptyRows::kAll;
    // A second pass over all keys, for fully masked rows. One loop for both passes: the code is large.
#pragma unroll 1
    for (bool unmasked = false;; unmasked = true) {
      Clear();
      ProcessTiles(unmasked);
      const bool some_empty = StoreOutput(unmasked);
      if (unmasked || !second_pass || __syncthreads_or(some_empty) == 0) return;
      if (p_.has_mask != 0) begin_ = full_ = 0, end_ = tiles_;
    }
  }

 private:
  // ---- KV tiles ----
  __device__ __forceinline__ KvTile Next(int* i, bool unmasked) const {
    return NextKvTile<S::kN>(p_, pad_, full_, end_, i, unmasked);
  }

  using Bits = TileBits<S::kBlocks>;
  __device__ __forceinline__ void FetchBits(const KvTile& entry, Bits* bits) const {
    bits->Fetch(p_.mask.bits, entry.bits, tile_row0_ / 16 + warp_ * S::kBlocks, lane_);
  }

  // ---- memory ----
  __device__ const __half* Queries() const { return reinterpret_cast<const __half*>(shared_); }
  __device__ float* QueryFactors() const { return reinterpret_cast<float*>(shared_ + 2 * S::kQueryElements); }
  __device__ char* Keys(int stage) const { return shared_ + S::kQueryBytes + stage * S::kKeyBytes; }
  __device__ char* Values(int stage) const {
    return stages_ == 0 ? shared_ + S::kQueryBytes
                        : shared_ + S::kQueryBytes + stages_ * S::kKeyBytes + stage * S::kValueBytes;
  }
  static __device__ __forceinline__ void Copy(char* to, const char* from) {
    constexpr int kTimes = S::kValueBytes / 16 / S::kThreads;
    static_assert(kTimes * 16 * S::kThreads == S::kValueBytes, "every thread copies as much");
    const uint32_t target = SharedAddress(to) + 16 * threadIdx.x;
    from += 16 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      CopyAsync16(target + 16 * S::kThreads * i, from + 16 * S::kThreads * i, true);
    }
  }
  __device__ __forceinline__ void FetchKeys(int tile, int stage) {
    if (tile >= 0) {
      const int64_t at = group_ * tiles_ + tile;
      Copy(Keys(stage), static_cast<const char*>(params_.key_tiles) + at * S::kValueBytes);
      if (threadIdx.x < S::kN / 4) {
        CopyAsync16(SharedAddress(Keys(stage) + S::kValueBytes + 16 * threadIdx.x),
                    params_.key_factors + at * S::kN + 4 * threadIdx.x, true);
      }
    }
    CommitCopies();
  }
  __device__ __forceinline__ void FetchValues(int tile, int stage) {
    if (tile >= 0) {
      Copy(Values(stage), static_cast<const char*>(params_.value_tiles) + (group_ * tiles_ + tile) * S::kValueBytes);
    }
    CommitCopies();
  }

  // Each warp loads its own rows.
  __device__ void LoadQueries() {
    const float* from = static_cast<const float*>(p_.query) + b_ * p_.query_stride.b + h_ * p_.query_stride.h;
    const bool aligned = AreRowsAligned(p_.query, p_.query_stride, p_.D);
    auto* high = reinterpret_cast<__half*>(shared_);
    constexpr int kRows = 16 * S::kBlocks, kAtOnce = 32 / S::kLanes;
    const int lane = lane_ % S::kLanes;
#pragma unroll 2
    for (int i = 0; i < kRows; i += kAtOnce) {
      const int row = warp_ * kRows + i + lane_ / S::kLanes;
      float4 x[S::kQuads];
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        x[j] =
            LoadQuad(from + (row0_ + row) * p_.query_stride.s, lane + j * S::kLanes, p_.D, row0_ + row < p_.S, aligned);
        largest = max(largest, LargestOf(x[j]));
      }
#pragma unroll
      for (int step = S::kLanes / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, step));
      }
      const int exponent = ExponentOf(largest, -100) - kTopExponent;
      if (lane == 0) QueryFactors()[row] = PowerOfTwo(exponent);
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        const int quad = lane + j * S::kLanes;
        if (4 * quad < kHead) {
          StoreQuad<kHead, kPlanes>(x[j], PowerOfTwo(-exponent), 1.0f, row, quad, high, S::kM * kHead);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Without score modification the scale converts to units of log2.
        scale_[i][r] = QueryFactors()[Row(i, r)] * (kScoreMod ? p_.scale : p_.scale * kLog2E);
      }
    }
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) max_[i][r] = -INFINITY, sum_[i][r] = 0.0f;
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[i][j][e] = 0.0f;
      }
    }
  }

  // ---- main loop ----
  // With one stage the next tile is loaded when all warps have read this one, and arrives under the other matmul.
  __device__ void ProcessTiles(bool unmasked) {
    int i = begin_;
    KvTile entry = Next(&i, unmasked);
    FetchKeys(entry.tile, 0);
    if (stages_ > 0) FetchValues(entry.tile, 0);
    int stage = 0;
    while (entry.tile >= 0) {
      const KvTile next = Next(&i, unmasked);
      const float value_factor = params_.value_factors[group_ * tiles_ + entry.tile];
      if (stages_ > 0) {
        WaitCopies<1>();  // keys; the values may still be in flight
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      const int other = stages_ == 2 ? stage ^ 1 : 0;
      if (stages_ == 2) FetchKeys(next.tile, other);
      float s[S::kBlocks][kColumns][4];
      Scores(entry.tile, Keys(stage), s);
      Bits bits;
      FetchBits(entry, &bits);
      if (stages_ < 2) {
        __syncthreads();
        if (stages_ == 1) {
          FetchKeys(next.tile, 0);
        } else {
          FetchValues(entry.tile, 0);
        }
      }
      ApplyMaskAndBias(entry, bits, unmasked, s);
      Softmax(s);
      if (stages_ > 0) {
        WaitCopies<1>();
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      if (stages_ == 2) FetchValues(next.tile, other);
      AddValues(reinterpret_cast<const __half*>(Values(stage)), value_factor, s);
      if (stages_ < 2) {
        __syncthreads();
        if (stages_ == 1) {
          FetchValues(next.tile, 0);
        } else {
          FetchKeys(next.tile, 0);
        }
      }
      entry = next;
      stage = other;
    }
    WaitCopies<0>();
    __syncthreads();
  }

  // ---- a tile: cuda/attention/fp32/step.cuh ----
  __device__ __forceinline__ int Row(int i, int r) const { return (warp_ * S::kBlocks + i) * 16 + lane_ / 4 + 8 * r; }
  __device__ __forceinline__ void Scores(int tile, const char* stage, float (&s)[S::kBlocks][kColumns][4]);
  // cuda/attention/fp32/relative.cuh
  __device__ __forceinline__ void AddRelativeTerms(int tile, const char* stage, float (&s)[S::kBlocks][kColumns][4]);
  static __device__ __forceinline__ void MmaGroup(float (&s)[S::kBlocks][kColumns][4], int j,
                                                  const uint32_t (&a)[S::kBlocks][4],
                                                  const uint32_t (&b)[kGroup / 2][4], bool first);
  __device__ __forceinline__ void ApplyMaskAndBias(const KvTile& entry, const Bits& bits, bool unmasked,
                                                   float (&s)[S::kBlocks][kColumns][4]);
  __device__ __forceinline__ void Softmax(float (&s)[S::kBlocks][kColumns][4]);
  __device__ __forceinline__ void AddValues(const __half* values, float factor,
                                            const float (&s)[S::kBlocks][kColumns][4]);

  // ---- epilogue ----
  // Normalizes and stores; with `only_empty` the fully masked rows alone. Gives whether this thread has such a row.
  __device__ bool StoreOutput(bool only_empty) {
    bool some_empty = false;
    float* const output = static_cast<float*>(p_.output) + b_ * p_.output_stride.b + h_ * p_.output_stride.h;
    const bool pairs = (reinterpret_cast<uintptr_t>(p_.output) % 8 |
                        ((p_.output_stride.b | p_.output_stride.h | p_.output_stride.s | p_.Dv) & 1)) == 0;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sum_[i][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool empty = sum == 0.0f;
        if (!only_empty) empty_[i][r] = empty;
        const int row = row0_ + Row(i, r);
        some_empty |= empty && row < p_.S;
        if (p_.sink != nullptr && !empty) {
          const float logit = static_cast<const float*>(p_.sink)[h_];
          sum += Exp2(fminf(ScoreDifference(logit * kLog2E, max_[i][r]), 127.0f));
        }
        if (!only_empty && lane_ % 4 == 0) StoreLse<float>(p_, b_, h_, row, max_[i][r], sum);
        // In the second pass, every bias of the row is -inf: the softmax of all keys is NaN.
        const bool nothing = empty && (only_empty || static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kNan);
        const float factor = empty ? 0.0f : 1.0f / sum;
        if (row >= p_.S || (only_empty && !empty_[i][r])) continue;
        float* const to = output + row * p_.output_stride.s;
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) {
          const int d = 8 * j + lane_ % 4 * 2;
          const float2 x =
              make_float2(nothing ? NAN : o_[i][j][2 * r] * factor, nothing ? NAN : o_[i][j][2 * r + 1] * factor);
          if (pairs) {
            if (d < p_.Dv) *reinterpret_cast<float2*>(to + d) = x;
          } else {
            if (d < p_.Dv) to[d] = x.x;
            if (d + 1 < p_.Dv) to[d + 1] = x.y;
          }
        }
      }
    }
    return some_empty;
  }

  const Fp32Params& params_;
  const AttentionParams& p_;
  const int stages_;
  char* const shared_;
  int b_, h_, row0_, tile_row0_, warp_, lane_, tiles_;
  int64_t group_;
  int begin_ = 0, full_ = 0, end_ = 0;
  const uint32_t* pad_;
  float scale_[S::kBlocks][2];
  float o_[S::kBlocks][kOutputs][4];
  float max_[S::kBlocks][2], sum_[S::kBlocks][2];
  bool empty_[S::kBlocks][2];
};

}  // namespace cuda
}  // namespace stof
#include "cuda/attention/fp32/relative.cuh"
#include "cuda/attention/fp32/step.cuh"
namespace stof {
namespace cuda {

struct Fp32RelativeParams : Fp32Params {
  RelativeParams relative;
};
template <bool kRelative>
using Fp32ParamsOf = std::conditional_t<kRelative, Fp32RelativeParams, Fp32Params>;

// CTAs an SM. Relative terms need registers for their products.
template <int kHead, int kPlanes, int kTile, bool kRelative>
constexpr int Fp32Ctas =
    kRelative && Fp32Shape<kHead, kPlanes, kTile>::kCtas > 2 ? 2 : Fp32Shape<kHead, kPlanes, kTile>::kCtas;

template <int kHead, int kPlanes, int kTile, bool kScoreMod, bool kRelative>
__global__ void __launch_bounds__(Fp32Shape<kHead, kPlanes, kTile>::kThreads,
                                  (Fp32Ctas<kHead, kPlanes, kTile, kRelative>))
    Fp32AttentionKernel(const __grid_constant__ Fp32ParamsOf<kRelative> params, int stages, int l2_heads) {
  extern __shared__ __align__(128) char fp32_shared[];
  if constexpr (kRelative) {
    Fp32Attention<kHead, kPlanes, kTile, kScoreMod, true>(params, {params.relative}, stages, l2_heads, fp32_shared)
        .Run();
  } else {
    Fp32Attention<kHead, kPlanes, kTile, kScoreMod, false>(params, {}, stages, l2_heads, fp32_shared).Run();
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_KERNEL_CUH_
