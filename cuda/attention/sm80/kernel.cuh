// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention for compute capability 8.0 and later, with mma.sync and cp.async. A CTA computes 128 or 64
// query rows of one head over the KV tiles that the block mask keeps. The softmax is online, as in FlashAttention 2
// (Dao 2023, sec. 3.1). Partial tiles apply their element mask, full ones none. Scores may have relative terms
// (cuda/attention/relative/) or operands in int8 (docs/design/attention-8bit.md).
#ifndef STOF_CUDA_ATTENTION_SM80_KERNEL_CUH_
#define STOF_CUDA_ATTENTION_SM80_KERNEL_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/attention/far_scores.cuh"
#include "cuda/attention/int8/layout.h"
#include "cuda/attention/lse.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/relative/params.h"
#include "cuda/attention/relative/products.cuh"
#include "cuda/attention/score_bias.cuh"
#include "cuda/attention/sm80/shape.cuh"
#include "cuda/attention/tile_iterator.cuh"
#include "cuda/common/mma_sm80.cuh"
#include "cuda/mask/tile_bits.cuh"

namespace stof {
namespace cuda {

struct Int8ScalesOf {
  const Int8Scales& int8;
};
// What a kernel's scores need beside AttentionParams.
template <Sm80Scores kScores>
using Sm80ScoreParams =
    std::conditional_t<kScores == Sm80Scores::kInt8, Int8ScalesOf, RelativeParamsOf<kScores == Sm80Scores::kRelative>>;

// The work of one CTA.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
class Sm80Attention : private Sm80ScoreParams<kScores> {
  static constexpr bool kRelative = kScores == Sm80Scores::kRelative, kInt8 = kScores == Sm80Scores::kInt8;
  using S = Sm80Shape<kHead, kScoreMod, kRows>;
  using R = Sm80RelativeShape<kHead, kScoreMod, kRows, kRelative>;
  using I = Sm80Int8Shape<kHead, kRows>;
  static constexpr int kColumns = S::kN / 8;                // blocks of 8 keys
  static constexpr int kOutputs = kHead / 8;                // blocks of 8 output elements
  static constexpr int kWords = kInt8 ? I::kWords : kHead;  // 16-bit words of a row of queries and of keys
  static constexpr int kSteps = kWords / 16;                // k-steps of 16 words of Q Kᵀ

 public:
  // stages: 0 where keys and values share one buffer.
  // In int8, query and key of p are codes, and their strides count 16-bit words.
  __device__ Sm80Attention(const AttentionParams& p, const Sm80ScoreParams<kScores>& scores, int stages, T* shared)
      : Sm80ScoreParams<kScores>(scores),
        p_(p),
        stages_(S::kLargeHead ? stages : R::kStages),
        shared_(shared),
        base_(SharedAddress(shared)) {
    const int sub_tile = static_cast<int>(blockIdx.x) % S::kCtasPerTile,
              item = static_cast<int>(blockIdx.x) / S::kCtasPerTile;
    const int rows = (p.S + kTileRows - 1) / kTileRows;
    const int bh = item / rows;
    int row = item % rows;
    b_ = bh / p.H;
    h_ = bh % p.H;
    const int g = h_ / (p.H / p.G);
    if (p.has_mask != 0) {
      const int table =
          p.mask.layout[(p.mask.layout_b == 1 ? 0 : b_) * p.mask.layout_h + (p.mask.layout_h == 1 ? 0 : h_)];
      row = p.mask.order[table * p.mask.rows + row];
      const int at = table * p.mask.rows + row;
      begin_ = p.mask.row_ptr[at];
      full_ = p.mask.full_begin[at];
      end_ = p.mask.row_end[at];
    } else {
      end_ = (p.T + S::kN - 1) / S::kN;
    }
    tile_row0_ = sub_tile * S::kM;
    row0_ = row * kTileRows + tile_row0_;
    query_ = static_cast<const T*>(p.query) + b_ * p.query_stride.b + h_ * p.query_stride.h;
    key_ = static_cast<const T*>(p.key) + b_ * p.key_stride.b + g * p.key_stride.h;
    value_ = static_cast<const T*>(p.value) + b_ * p.value_stride.b + g * p.value_stride.h;
    output_ = static_cast<T*>(p.output) + b_ * p.output_stride.b + h_ * p.output_stride.h;
    pad_ = p.pad_bits == nullptr ? nullptr : p.pad_bits + static_cast<int64_t>(b_) * ((p.T + S::kN - 1) / S::kN) * 2;
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    // The plain kernel scales scores to units of log2; a scale <= 0 needs kScoreMod. Scales of codes contain it.
    scale_ = kScoreMod || kInt8 ? 1.0f : p.scale * kLog2E;
    if constexpr (kInt8) scale_tile_ = (b_ * p.G + g) * this->int8.tiles;
  }

  __device__ void Run() {
    if (row0_ >= p_.S || (p_.only_flagged != nullptr && !HasFlaggedRow())) return;
    const auto policy = static_cast<EmptyRows>(p_.empty_rows);
    const bool second_pass = policy == EmptyRows::kMean || policy == EmptyRows::kAll;
    if constexpr (S::kLargeHead || kRelative) {
      // One loop for both passes: twice the code would need more registers than there are.
#pragma unroll 1
      for (bool unmasked = false;; unmasked = true) {
        LoadQueries();  // the output has replaced them
        Clear();
        if constexpr (S::kM < kTileRows || !S::kLargeHead) {
          ProcessTiles(unmasked);
        } else {
          ProcessTilesLargeHead(unmasked);
        }
        const bool some_empty = StoreOutput(unmasked);
        if (unmasked || !second_pass || __syncthreads_or(some_empty) == 0) return;
        if (p_.has_mask != 0) begin_ = full_ = 0, end_ = (p_.T + S::kN - 1) / S::kN;
      }
    } else {
      LoadQueries();
      Clear();
      ProcessTiles(false);
      const bool some_empty = StoreOutput(false);
      if (!second_pass || __syncthreads_or(some_empty) == 0) return;
      // A second pass over all keys, for fully masked rows.
      if (p_.has_mask != 0) begin_ = full_ = 0, end_ = (p_.T + S::kN - 1) / S::kN;
      __syncthreads();
      if constexpr (!S::kQueriesInRegisters) LoadQueries();  // the output was staged in their memory
      Clear();
      ProcessTiles(true);
      StoreOutput(true);
    }
  }

 private:
  __device__ bool HasFlaggedRow() const {
    const int flags = (p_.S + 63) / 64;
    const int32_t* flag = p_.only_flagged + static_cast<int64_t>(b_ * p_.H + h_) * flags;
    for (int i = row0_ / 64; i < min(flags, (row0_ + S::kM) / 64); ++i) {
      if (flag[i] != 0) return true;
    }
    return false;
  }

  // ---- KV tiles ----
  __device__ __forceinline__ KvTile Next(int* i, bool unmasked) const {
    return NextKvTile<S::kN>(p_, pad_, full_, end_, i, unmasked);
  }

  using Bits = TileBits<S::kBlocks>;
  __device__ __forceinline__ void FetchBits(const KvTile& entry, Bits* bits) const {
    bits->Fetch(p_.mask.bits, entry.bits, tile_row0_ / 16 + warp_ * S::kBlocks, lane_);
  }

  // ---- memory ----
  // Addresses in shared memory.
  __device__ __forceinline__ uint32_t Keys(int stage) const {
    if constexpr (kInt8) return base_ + I::kQueryBytes + stage * I::kKeyBytes;
    return base_ + 2 * (S::kM * kHead + stage * S::kStage);
  }
  __device__ __forceinline__ uint32_t Values(int stage) const {
    if constexpr (kInt8) return Keys(S::kStages) + stage * I::kValueBytes;
    if constexpr (R::kHasRings) return base_;
    if constexpr (S::kLargeHead) return Keys(stages_);
    return Keys(S::kStages + stage);
  }
  __device__ __forceinline__ void FetchKeys(int tile, int stage) const {
    if (tile >= 0) {
      const int size = kInt8 ? kWords : p_.D;
      LoadRows<kWords, S::kThreads, S::kN>(Keys(stage), key_, p_.key_stride.s, tile * S::kN, p_.T, size);
      if constexpr (kInt8) FetchTileScales(tile, Keys(stage) + I::kScales);
    }
    CommitCopies();
  }
  __device__ __forceinline__ void FetchValues(int tile, int stage) const {
    if (tile >= 0) {
      LoadRows<kHead, S::kThreads, S::kN>(Values(stage), value_, p_.value_stride.s, tile * S::kN, p_.T, p_.Dv);
    }
    CommitCopies();
  }

  __device__ void LoadQueries() {
    LoadRows<kWords, S::kThreads, S::kM>(base_, query_, p_.query_stride.s, row0_, p_.S, kInt8 ? kWords : p_.D);
    CommitCopies();
    if constexpr (kInt8) LoadQueryScales();
  }
  // Called after the copies of the first KV tile were issued, which may still be in flight.
  __device__ void KeepQueriesInRegisters() {
    static_assert(R::kHasRings || S::kStages == 2, "copies of keys and of values are two groups");
    WaitCopies<R::kHasRings ? 1 : 2>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) ReadQueries(k, q_[k]);
  }
  __device__ __forceinline__ void ReadQueries(int k, uint32_t (&q)[S::kBlocks][4]) const {
    const uint32_t first = base_ + 2 * SwizzledOffset<kWords>(warp_ * S::kBlocks * 16 + lane_ % 16, lane_ / 16);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) LoadMatrix4(q[i], ChunkAddress<kWords>(first, 2 * k) + 2 * 16 * i * kWords);
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

  // ---- the loop ----
  __device__ void ProcessTiles(bool unmasked) {
    int i = begin_;
    KvTile entry = Next(&i, unmasked);
    if constexpr (kRelative) FetchRelativeRows(entry.tile, false);
    FetchKeys(entry.tile, 0);
    if constexpr (R::kStages == 2) FetchValues(entry.tile, 0);
    if constexpr (S::kQueriesInRegisters) {
      if (!unmasked) KeepQueriesInRegisters();
    }
    int stage = 0;
    while (entry.tile >= 0) {
      const KvTile next = Next(&i, unmasked);
      float s[S::kBlocks][kColumns][4];
      if constexpr (R::kStages == 2) {
        WaitCopies<0>();
        __syncthreads();
        if constexpr (kRelative) FetchRelativeRows(next.tile, next.tile == entry.tile + 1);
        FetchKeys(next.tile, stage ^ 1);
        FetchValues(next.tile, stage ^ 1);
        Scores(entry.tile, Keys(stage), s);
        Bits bits;
        if constexpr (S::kEarlyMask) FetchBits(entry, &bits);
        ApplyMaskAndBias(entry, &bits, unmasked, s);
        const bool subtracted = RaiseMax(s);
        AddValues(Values(stage), subtracted, s);
        stage ^= 1;
      } else {
        WaitCopies<0>();
        __syncthreads();
        FetchValues(entry.tile, 0);
        Scores(entry.tile, Keys(0), s);
        WaitCopies<0>();
        __syncthreads();
        if constexpr (kRelative) FetchRelativeRows(next.tile, next.tile == entry.tile + 1);
        FetchKeys(next.tile, 0);
        Bits bits;
        if constexpr (S::kEarlyMask) FetchBits(entry, &bits);
        ApplyMaskAndBias(entry, &bits, unmasked, s);
        const bool subtracted = RaiseMax(s);
        AddValues(Values(0), subtracted, s);
      }
      entry = next;
    }
    WaitCopies<0>();
  }

  // The same for 128 rows and heads above 128, with one CTA an SM. The next tile is loaded when all warps have read
  // this one, and arrives under the other matmul.
  __device__ void ProcessTilesLargeHead(bool unmasked) {
    int i = begin_;
    KvTile entry = Next(&i, unmasked);
    FetchKeys(entry.tile, 0);
    if (stages_ > 0) FetchValues(entry.tile, 0);
    while (entry.tile >= 0) {
      const KvTile next = Next(&i, unmasked);
      WaitForOne();  // keys and queries; the values may still be in flight
      float s[S::kBlocks][kColumns][4];
      Scores(entry.tile, Keys(0), s);
      __syncthreads();
      if (stages_ > 0) {
        FetchKeys(next.tile, 0);
      } else {
        FetchValues(entry.tile, 0);
      }
      Bits bits;
      ApplyMaskAndBias(entry, &bits, unmasked, s);
      const bool subtracted = RaiseMax(s);
      WaitForOne();
      AddValues(Values(0), subtracted, s);
      __syncthreads();
      if (stages_ > 0) {
        FetchValues(next.tile, 0);
      } else {
        FetchKeys(next.tile, 0);
      }
      entry = next;
    }
    WaitCopies<0>();
  }
  __device__ __forceinline__ void WaitForOne() const {
    if (stages_ > 0) {
      WaitCopies<1>();
    } else {
      WaitCopies<0>();
    }
    __syncthreads();
  }

  // ---- a tile: cuda/attention/sm80/step.cuh ----
  __device__ __forceinline__ int Row(int i, int r) const { return (warp_ * S::kBlocks + i) * 16 + lane_ / 4 + 8 * r; }
  __device__ __forceinline__ void Scores(int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]);
  // cuda/attention/sm80/int8.cuh
  __device__ __forceinline__ void LoadQueryScales() const;
  __device__ __forceinline__ void FetchTileScales(int tile, uint32_t to) const;
  __device__ __forceinline__ void Dequantize(int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]) const;
  __device__ __forceinline__ float ShiftOf(int row) const;
  // cuda/attention/sm80/relative.cuh
  __device__ __forceinline__ void FetchRelativeRows(int tile, bool follows) const;
  template <bool kInRing>
  __device__ __forceinline__ void FetchRelativeRows(const BandTerm& term, int first, int from, uint32_t ring) const;
  template <bool kInRing>
  __device__ __forceinline__ auto RelativeRows(const BandTerm& term, int first, int lane, uint32_t ring) const;
  __device__ __forceinline__ bool AddRelativeTerms(int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]);
  __device__ __forceinline__ void ApplyMaskAndBias(const KvTile& entry, Bits* bits, bool unmasked,
                                                   float (&s)[S::kBlocks][kColumns][4]);
  __device__ __forceinline__ bool RaiseMax(float (&s)[S::kBlocks][kColumns][4]);
  __device__ __forceinline__ void ComputeWeights(int k, bool subtracted, const float (&s)[S::kBlocks][kColumns][4],
                                                 uint32_t (&a)[S::kBlocks][4]);
  __device__ __forceinline__ void AddValues(uint32_t values, bool subtracted,
                                            const float (&s)[S::kBlocks][kColumns][4]);

  // ---- epilogue ----
  // Normalizes and stores; with `only_empty` the fully masked rows alone. Gives whether this thread has such a row.
  __device__ bool StoreOutput(bool only_empty) {
    bool some_empty = false;
    float factor[S::kBlocks][2];
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sum_[i][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool empty = sum == 0.0f;
        // In a second pass that gives the mean of all keys, scores are zeros.
        if constexpr (kInt8) {
          if (!only_empty || static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kAll) max_[i][r] += ShiftOf(Row(i, r));
        }
        if (!only_empty) empty_[i][r] = empty;
        some_empty |= empty && row0_ + Row(i, r) < p_.S;
        if (p_.sink != nullptr && !empty) {
          const float logit = p_.sink_is_float != 0 ? static_cast<const float*>(p_.sink)[h_]
                                                    : ToFloat(static_cast<const T*>(p_.sink)[h_]);
          sum += Exp2(fminf(ScoreDifference(logit * kLog2E, max_[i][r]), 127.0f));
        }
        if (!only_empty && lane_ % 4 == 0) StoreLse<T>(p_, b_, h_, row0_ + Row(i, r), max_[i][r], sum);
        // In the second pass, every bias of the row is -inf: the softmax of all keys is NaN.
        const bool undefined = only_empty || static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kNan;
        factor[i][r] = empty ? (undefined ? NAN : 0.0f) : 1.0f / sum;
      }
    }
    // Through shared memory, for stores of 16 bytes. Each warp has its own rows there.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool nothing = isnan(factor[i][r]);
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) {
          const float x = nothing ? factor[i][r] : o_[i][j][2 * r] * factor[i][r];
          const float y = nothing ? factor[i][r] : o_[i][j][2 * r + 1] * factor[i][r];
          *reinterpret_cast<uint32_t*>(shared_ + SwizzledOffset<kHead>(Row(i, r), j) + lane_ % 4 * 2) = Pack<T>(x, y);
        }
      }
    }
    // The rows of the warp to store: bit 2 i + r of the lanes that hold the row.
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) mine |= (!only_empty || empty_[i][r] ? 1u : 0u) << (2 * i + r);
    }
    __syncwarp();
    constexpr int kLines = 16 * S::kBlocks;
    for (int at = lane_; at < kLines * S::kChunks; at += 32) {
      const int local = at / S::kChunks, chunk = at % S::kChunks;
      const uint32_t written = __shfl_sync(~0u, mine, local % 8 * 4);
      const int row = warp_ * kLines + local;
      if (row0_ + row >= p_.S || 8 * chunk >= p_.Dv) continue;
      if ((written >> (local / 16 * 2 + local / 8 % 2) & 1u) == 0) continue;
      T* to = output_ + static_cast<int64_t>(row0_ + row) * p_.output_stride.s + 8 * chunk;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(shared_ + SwizzledOffset<kHead>(row, chunk));
    }
    return some_empty;
  }

  const AttentionParams& p_;
  const int stages_;
  T* const shared_;
  const uint32_t base_;
  int b_, h_, tile_row0_, row0_, warp_, lane_;
  int begin_ = 0, full_ = 0, end_ = 0;
  float scale_;
  int scale_tile_ = 0;  // in int8: the head's first tile of the quantization
  const T *query_, *key_, *value_;
  T* output_;
  const uint32_t* pad_;
  uint32_t q_[S::kQueriesInRegisters ? kSteps : 1][S::kBlocks][4];
  float o_[S::kBlocks][kOutputs][4];
  float max_[S::kBlocks][2], sum_[S::kBlocks][2];
  bool empty_[S::kBlocks][2];
};

}  // namespace cuda
}  // namespace stof
#include "cuda/attention/sm80/int8.cuh"
#include "cuda/attention/sm80/relative.cuh"
#include "cuda/attention/sm80/step.cuh"
#endif  // STOF_CUDA_ATTENTION_SM80_KERNEL_CUH_
