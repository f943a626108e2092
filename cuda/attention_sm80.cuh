// SPDX-License-Identifier: Apache-2.0
// Block-wise attention for compute capability 8.0 and later: mma.sync, cp.async, one CTA for a tile of 128 query rows
// of one head, which walks the key tiles that the block mask keeps. The softmax is online, as in FlashAttention 2 (Dao
// 2023, sec. 3.1); partial tiles take their bits from the mask, full ones none.
#ifndef STOF_CUDA_ATTENTION_SM80_CUH_
#define STOF_CUDA_ATTENTION_SM80_CUH_

#include <cuda_runtime.h>

#include "cuda/attention.h"
#include "cuda/launch.cuh"
#include "cuda/log_sum.cuh"
#include "cuda/mma_sm80.cuh"

namespace stof {
namespace cuda {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLowest = -3.4028234663852886e38f;
// The running maximum is raised only when a score exceeds it by 2^8, so that the output is rescaled a few times per row
// (FlashAttention 4 has the same idea).
constexpr float kSlack = 8.0f;

// Warps of 32 rows read keys and values half as often as those of 16, which is what bounds the wider heads; biases, and
// the output of heads above 128, need the registers.
template <int kHead, bool kExtras>
struct Shape {
  static constexpr int kM = kTileRows, kN = kTileKeys;
  // Heads above 128 may find too little shared memory for two stages of keys and values: then one, or, 0, one buffer
  // for both in turn, as the device has it.
  static constexpr bool kTight = kHead > 128;
  static constexpr int kWarps = kHead <= 64 || (!kExtras && !kTight) ? 4 : 8;
  // Queries stay in registers where there is room, and are read again for each tile otherwise.
  static constexpr bool kHeldQueries = !kTight && (kHead <= 64 || kWarps == 8);
  // Buffers for keys and for values. With one, the keys of a tile come under the softmax and the product with the
  // values of the tile before, and its values under its scores; two CTAs fit a multiprocessor then. The most there
  // can be where kTight.
  static constexpr int kStages = kHead <= 64 || kWarps == 8 ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kM / kWarps / 16;  // of 16 rows, a warp
  static constexpr int kChunks = kHead / 8;         // of 16 bytes, a row
  static constexpr int kStage = kN * kHead;         // elements
  static constexpr int SharedBytes(int stages) { return 2 * (kM * kHead + (stages == 0 ? 1 : 2 * stages) * kStage); }
  static constexpr int kCtas = kWarps == 8 ? 1 : 2;  // of a multiprocessor
};

// Where chunk c of a row lies: neighbours of a column of chunks fall into different banks.
template <int kHead>
__device__ __forceinline__ int Place(int row, int chunk) {
  return row * kHead + ((chunk ^ (kHead % 64 == 0 ? row & 7 : row >> 1 & 3)) << 3);
}

// Rows [first, first + kCount) of a head with `rows` rows of `size` elements into shared memory, zeros beyond either
// end. No state: what a thread could keep for the next tile is registers that the wide heads do not have.
template <int kHead, int kThreads, int kCount, typename T>
__device__ __forceinline__ void LoadRows(uint32_t to, const T* from, int64_t stride, int first, int rows, int size) {
  constexpr int kChunks = kHead / 8;
  if constexpr (kThreads % (8 * kChunks) == 0) {
    // A chunk has the same place in its row in all steps.
    constexpr int kStep = kThreads / kChunks;  // rows between two of a thread
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
    const bool inside = 8 * chunk < size;
    const uint32_t place = to + 2 * static_cast<uint32_t>(Place<kHead>(row, chunk));
    const T* source = from + (first + row) * stride + 8 * chunk;
#pragma unroll
    for (int i = 0; i < kCount / kStep; ++i) {
      const bool valid = inside && first + row + i * kStep < rows;
      CopyAsync16(place + 2 * i * kStep * kHead, valid ? source : from, valid);
      source += kStep * stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount * kChunks / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / kChunks, chunk = at % kChunks;
      const bool valid = first + row < rows && 8 * chunk < size;
      CopyAsync16(to + 2 * Place<kHead>(row, chunk), from + (valid ? (first + row) * stride + 8 * chunk : 0), valid);
    }
  }
}

// One CTA's work.
template <int kHead, typename T, bool kExtras>
class Attention {
  using S = Shape<kHead, kExtras>;
  static constexpr int kColumns = S::kN / 8;  // blocks of 8 keys
  static constexpr int kOutputs = kHead / 8;  // blocks of 8 output elements
  static constexpr int kSteps = kHead / 16;   // of the inner product

 public:
  // stages: of heads above 128.
  __device__ Attention(const AttentionParams& p, int stages, T* shared)
      : p_(p), stages_(S::kTight ? stages : S::kStages), shared_(shared), base_(SharedAddress(shared)) {
    const int item = static_cast<int>(blockIdx.x);
    const int rows = (p.S + S::kM - 1) / S::kM;
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
    row0_ = row * S::kM;
    query_ = static_cast<const T*>(p.query) + b_ * p.query_stride.b + h_ * p.query_stride.h;
    key_ = static_cast<const T*>(p.key) + b_ * p.key_stride.b + g * p.key_stride.h;
    value_ = static_cast<const T*>(p.value) + b_ * p.value_stride.b + g * p.value_stride.h;
    output_ = static_cast<T*>(p.output) + b_ * p.output_stride.b + h_ * p.output_stride.h;
    pad_ = p.pad_bits == nullptr ? nullptr : p.pad_bits + static_cast<int64_t>(b_) * ((p.T + S::kN - 1) / S::kN) * 2;
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    // Scores come in units of log2 where nothing has to be done to them before; a scale that is not positive needs
    // kExtras.
    scale_ = kExtras ? 1.0f : p.scale * kLog2E;
    inverse_softcap_ = 1.0f / p.softcap;
  }

  __device__ void Run() {
    if (p_.only != nullptr && !Wanted()) return;
    const auto policy = static_cast<EmptyRows>(p_.empty_rows);
    const bool twice = policy == EmptyRows::kMean || policy == EmptyRows::kAll;
    if constexpr (S::kTight) {
      // One loop for both times: twice the code wants more registers than there are.
#pragma unroll 1
      for (bool unmasked = false;; unmasked = true) {
        LoadQueries();  // where they lay is output the second time
        Clear();
        SweepTight(unmasked);
        const bool some_empty = Finish(unmasked);
        if (unmasked || !twice || __syncthreads_or(some_empty) == 0) return;
        if (p_.has_mask != 0) begin_ = full_ = 0, end_ = (p_.T + S::kN - 1) / S::kN;
      }
    } else {
      LoadQueries();
      Clear();
      Sweep(false);
      const bool some_empty = Finish(false);
      if (!twice || __syncthreads_or(some_empty) == 0) return;
      // Once more over all keys, for the rows without any.
      if (p_.has_mask != 0) begin_ = full_ = 0, end_ = (p_.T + S::kN - 1) / S::kN;
      __syncthreads();
      if constexpr (!S::kHeldQueries) LoadQueries();  // the output went through their memory
      Clear();
      Sweep(true);
      Finish(true);
    }
  }

 private:
  __device__ bool Wanted() const {
    const int pieces = (p_.S + 63) / 64;
    const int32_t* only = p_.only + static_cast<int64_t>(b_ * p_.H + h_) * pieces;
    for (int i = row0_ / 64; i < min(pieces, (row0_ + S::kM) / 64); ++i) {
      if (only[i] != 0) return true;
    }
    return false;
  }

  // ---- which tiles ----
  struct Entry {
    int tile = -1;  // -1: none is left
    int bits = -1;  // index of its bits, -1: every key
    uint32_t pad[2] = {~0u, ~0u};
  };
  // The first entry from `i` on that padding leaves something of; i moves behind it.
  __device__ __forceinline__ Entry Next(int* i, bool unmasked) const {
    Entry entry;
    while (*i < end_) {
      const int at = (*i)++;
      if (p_.has_mask != 0 && !unmasked) {
        entry.tile = p_.mask.key_tile[at];
        entry.bits = at < full_ ? p_.mask.bits_id[at] : -1;
      } else {
        entry.tile = at;
      }
      if (pad_ != nullptr && !unmasked) {
        entry.pad[0] = pad_[2 * entry.tile];
        entry.pad[1] = pad_[2 * entry.tile + 1];
        if ((entry.pad[0] | entry.pad[1]) == 0) continue;
      } else if ((entry.tile + 1) * S::kN > p_.T) {
        const int keys = p_.T - entry.tile * S::kN;
        entry.pad[0] = keys >= 32 ? ~0u : (1u << keys) - 1u;
        entry.pad[1] = keys <= 32 ? 0u : (1u << (keys - 32)) - 1u;
      }
      return entry;
    }
    entry.tile = -1;
    return entry;
  }

  // ---- memory ----
  // Addresses in shared memory.
  __device__ __forceinline__ uint32_t Keys(int stage) const { return base_ + 2 * (S::kM * kHead + stage * S::kStage); }
  __device__ __forceinline__ uint32_t Values(int stage) const {
    if constexpr (S::kTight) return Keys(stages_ == 0 ? 0 : stages_ + stage);
    return Keys(S::kStages + stage);
  }
  __device__ __forceinline__ void FetchKeys(int tile, int stage) const {
    if (tile >= 0) {
      LoadRows<kHead, S::kThreads, S::kN>(Keys(stage), key_, p_.key_stride.s, tile * S::kN, p_.T, p_.D);
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
    LoadRows<kHead, S::kThreads, S::kM>(base_, query_, p_.query_stride.s, row0_, p_.S, p_.D);
    CommitCopies();
    if constexpr (S::kHeldQueries) {
      WaitCopies<0>();
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) ReadQueries(k, q_[k]);
    }
  }
  __device__ __forceinline__ void ReadQueries(int k, uint32_t (&q)[S::kBlocks][4]) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const int row = (warp_ * S::kBlocks + i) * 16 + lane_ % 16;
      LoadMatrix4(q[i], base_ + 2 * Place<kHead>(row, 2 * k + lane_ / 16));
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

  // ---- the loop ----
  __device__ void Sweep(bool unmasked) {
    int i = begin_;
    Entry entry = Next(&i, unmasked);
    FetchKeys(entry.tile, 0);
    if constexpr (S::kStages == 2) FetchValues(entry.tile, 0);
    int stage = 0;
    while (entry.tile >= 0) {
      const Entry next = Next(&i, unmasked);
      float s[S::kBlocks][kColumns][4];
      if constexpr (S::kStages == 2) {
        WaitCopies<1>();  // the keys; the values may still come
        __syncthreads();
        FetchKeys(next.tile, stage ^ 1);
        Scores(Keys(stage), s);
        Adjust(entry, unmasked, s);
        Softmax(s);
        WaitCopies<1>();
        __syncthreads();
        FetchValues(next.tile, stage ^ 1);
        AddValues(Values(stage), s);
        stage ^= 1;
      } else {
        WaitCopies<0>();
        __syncthreads();
        FetchValues(entry.tile, 0);
        Scores(Keys(0), s);
        WaitCopies<0>();
        __syncthreads();
        FetchKeys(next.tile, 0);
        Adjust(entry, unmasked, s);
        Softmax(s);
        AddValues(Values(0), s);
      }
      entry = next;
    }
    WaitCopies<0>();
  }

  // The same for heads above 128. With one stage the next tile is asked for when everybody has done with this one, and
  // comes under the other product.
  __device__ void SweepTight(bool unmasked) {
    int i = begin_;
    Entry entry = Next(&i, unmasked);
    FetchKeys(entry.tile, 0);
    if (stages_ > 0) FetchValues(entry.tile, 0);
    int stage = 0;
    while (entry.tile >= 0) {
      const Entry next = Next(&i, unmasked);
      const int other = stages_ == 2 ? stage ^ 1 : 0;
      WaitForOne();  // the keys and the queries; the values may still come
      if (stages_ == 2) FetchKeys(next.tile, other);
      float s[S::kBlocks][kColumns][4];
      Scores(Keys(stage), s);
      if (stages_ < 2) {
        __syncthreads();
        if (stages_ == 1) {
          FetchKeys(next.tile, 0);
        } else {
          FetchValues(entry.tile, 0);
        }
      }
      Adjust(entry, unmasked, s);
      Softmax(s);
      WaitForOne();
      if (stages_ == 2) FetchValues(next.tile, other);
      AddValues(Values(stage), s);
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
  }
  __device__ __forceinline__ void WaitForOne() const {
    if (stages_ > 0) {
      WaitCopies<1>();
    } else {
      WaitCopies<0>();
    }
    __syncthreads();
  }

  __device__ __forceinline__ void Scores(uint32_t keys, float (&s)[S::kBlocks][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
      }
    }
    constexpr int kAtOnce = S::kTight ? 4 : kSteps;  // more would take registers
#pragma unroll kAtOnce
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!S::kHeldQueries) ReadQueries(k, q_[0]);
      const uint32_t (&q)[S::kBlocks][4] = q_[S::kHeldQueries ? k : 0];
#pragma unroll
      for (int j = 0; j < kColumns; j += 2) {
        uint32_t b[4];
        const int row = 8 * j + lane_ % 8 + lane_ / 16 * 8;
        LoadMatrix4(b, keys + 2 * Place<kHead>(row, 2 * k + lane_ / 8 % 2));
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i) {
          Mma<T>(s[i][j], q[i], b[0], b[1]);
          Mma<T>(s[i][j + 1], q[i], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ int Row(int i, int r) const { return (warp_ * S::kBlocks + i) * 16 + lane_ / 4 + 8 * r; }

  __device__ __forceinline__ void Adjust(const Entry& entry, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
    if constexpr (kExtras) AddBiases(entry.tile * S::kN, unmasked, s);
    if (unmasked && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kMean) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
        }
      }
    }
    if (entry.bits < 0 && (entry.pad[0] & entry.pad[1]) == ~0u) return;
    // Not a pointer that may be null: ptxas 13.0 compares it with zero sooner than the zero arrives
    // (docs/cuda-kernel.md).
    const uint32_t* bits = p_.mask.bits + static_cast<int64_t>(max(entry.bits, 0)) * S::kM * 2;
    const int shift = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t word[2] = {entry.pad[0], entry.pad[1]};
        if (entry.bits >= 0) {
          uint32_t own[2];
          LoadConstant(own, bits + 2 * Row(i, r));
          word[0] &= own[0];
          word[1] &= own[1];
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint32_t here = word[j / 4] >> (j % 4 * 8 + shift);
          if ((here & 1u) == 0) s[i][j][2 * r] = -INFINITY;
          if ((here & 2u) == 0) s[i][j][2 * r + 1] = -INFINITY;
        }
      }
    }
  }

  // Scale, softcap and biases; scores come out in units of log2. What lies beyond the tensors reads their last element
  // and is forbidden afterwards: without branches around the loads. With them, the compiler (13.0) let a warp that
  // skipped all of them run into the next load without its memory descriptor.
  __device__ __forceinline__ void AddBiases(int key0, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
    const int radius = static_cast<int>(p_.relative_bias_size / 2);
    const float* relative =
        p_.relative_bias == nullptr ? nullptr : p_.relative_bias + h_ * p_.relative_bias_stride_h + radius;
    const int64_t head = b_ * p_.bias_stride_b + h_ * p_.bias_stride_h;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = min(row0_ + Row(i, e / 2), p_.S - 1);
          const int key = min(key0 + 8 * j + lane_ % 4 * 2 + e % 2, p_.T - 1);
          float x = s[i][j][e] * p_.scale;
          if (p_.softcap > 0.0f) x = p_.softcap * tanhf(x * inverse_softcap_);
          float bias = 0.0f;
          if (p_.bias != nullptr) {
            const int64_t at = head + row * p_.bias_stride_q + key * p_.bias_stride_k;
            bias = p_.bias_is_float != 0 ? static_cast<const float*>(p_.bias)[at]
                                         : ToFloat(static_cast<const T*>(p_.bias)[at]);
          }
          if (relative != nullptr) bias += relative[max(-radius, min(radius, key - (p_.query_position + row)))];
          float sum = (x + bias) * kLog2E;
          // The lowest finite value is a bias, not a mask: it must not become -inf in units of log2. NaN stays NaN.
          if (sum == -INFINITY) sum = kLowest;
          s[i][j][e] = bias == -INFINITY ? (unmasked ? x * kLog2E : -INFINITY) : sum;
        }
      }
    }
  }

  __device__ __forceinline__ void Softmax(float (&s)[S::kBlocks][kColumns][4]) {
    float factor[S::kBlocks][2];
    bool any = false;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float high = -INFINITY;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) high = fmaxf(high, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2)) * scale_;
        const float old = max_[i][r];
        const bool raised = high > old + kSlack;
        max_[i][r] = raised ? high : old;
        factor[i][r] = raised ? Exp2(old - high) : 1.0f;  // 0 from -inf
        any |= raised;
      }
    }
    if (__any_sync(~0u, any)) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          sum_[i][r] *= factor[i][r];
#pragma unroll
          for (int j = 0; j < kOutputs; ++j) o_[i][j][2 * r] *= factor[i][r], o_[i][j][2 * r + 1] *= factor[i][r];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = max_[i][r] == -INFINITY ? 0.0f : max_[i][r];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[i][j][e] = Exp2(s[i][j][e] * scale_ - base);
            sum_[i][r] += s[i][j][e];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void AddValues(uint32_t values, const float (&s)[S::kBlocks][kColumns][4]) {
#pragma unroll
    for (int k = 0; k < S::kN / 16; ++k) {
      uint32_t a[S::kBlocks][4];
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        a[i][0] = Pack<T>(s[i][2 * k][0], s[i][2 * k][1]);
        a[i][1] = Pack<T>(s[i][2 * k][2], s[i][2 * k][3]);
        a[i][2] = Pack<T>(s[i][2 * k + 1][0], s[i][2 * k + 1][1]);
        a[i][3] = Pack<T>(s[i][2 * k + 1][2], s[i][2 * k + 1][3]);
      }
#pragma unroll
      for (int j = 0; j < kOutputs; j += 2) {
        uint32_t b[4];
        LoadMatrix4Transposed(b, values + 2 * Place<kHead>(16 * k + lane_ % 16, j + lane_ / 16));
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i) {
          Mma<T>(o_[i][j], a[i], b[0], b[1]);
          Mma<T>(o_[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // ---- the end ----
  // Divides and writes; with `only_empty` the rows that had no key. Whether this thread saw one.
  __device__ bool Finish(bool only_empty) {
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
        if (!only_empty) empty_[i][r] = empty;
        some_empty |= empty && row0_ + Row(i, r) < p_.S;
        if (p_.sink != nullptr && !empty) {
          const float logit = p_.sink_is_float != 0 ? static_cast<const float*>(p_.sink)[h_]
                                                    : ToFloat(static_cast<const T*>(p_.sink)[h_]);
          sum += Exp2(fminf(logit * kLog2E - max_[i][r], 127.0f));
        }
        if (!only_empty && lane_ % 4 == 0) StoreLogSum<T>(p_, b_, h_, row0_ + Row(i, r), max_[i][r], sum);
        factor[i][r] = empty ? (static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kNan ? NAN : 0.0f) : 1.0f / sum;
      }
    }
    // Through shared memory, so that rows are written 16 bytes at a time. Each warp has its own rows there.
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
          *reinterpret_cast<uint32_t*>(shared_ + Place<kHead>(Row(i, r), j) + lane_ % 4 * 2) = Pack<T>(x, y);
        }
      }
    }
    // Which rows of the warp are written: bit 2 i + r of the lanes that hold the row.
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) mine |= (!only_empty || empty_[i][r] ? 1u : 0u) << (2 * i + r);
    }
    __syncwarp();
    constexpr int kRows = 16 * S::kBlocks;
    for (int at = lane_; at < kRows * S::kChunks; at += 32) {
      const int local = at / S::kChunks, chunk = at % S::kChunks;
      const uint32_t written = __shfl_sync(~0u, mine, local % 8 * 4);
      const int row = warp_ * kRows + local;
      if (row0_ + row >= p_.S || 8 * chunk >= p_.Dv) continue;
      if ((written >> (local / 16 * 2 + local / 8 % 2) & 1u) == 0) continue;
      T* to = output_ + static_cast<int64_t>(row0_ + row) * p_.output_stride.s + 8 * chunk;
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(shared_ + Place<kHead>(row, chunk));
    }
    return some_empty;
  }

  const AttentionParams& p_;
  const int stages_;
  T* const shared_;
  const uint32_t base_;
  int b_, h_, row0_, warp_, lane_;
  int begin_ = 0, full_ = 0, end_ = 0;
  float scale_, inverse_softcap_;
  const T *query_, *key_, *value_;
  T* output_;
  const uint32_t* pad_;
  uint32_t q_[S::kHeldQueries ? kSteps : 1][S::kBlocks][4];
  float o_[S::kBlocks][kOutputs][4];
  float max_[S::kBlocks][2], sum_[S::kBlocks][2];
  bool empty_[S::kBlocks][2];
};

struct Sm80Params {
  AttentionParams attention;
  int stages = 2;
};

template <int kHead, typename T, bool kExtras>
__global__ void __launch_bounds__(Shape<kHead, kExtras>::kThreads, Shape<kHead, kExtras>::kCtas)
    AttentionKernel(const __grid_constant__ Sm80Params params) {
  extern __shared__ __align__(128) unsigned char shared[];
  Attention<kHead, T, kExtras>(params.attention, params.stages, reinterpret_cast<T*>(shared)).Run();
}

// The most stages for which the device has the shared memory.
template <int kHead, bool kExtras>
cudaError_t StagesOf(int* stages) {
  using S = Shape<kHead, kExtras>;
  *stages = S::kStages;
  if (!S::kTight) return cudaSuccess;
  int device = 0, block = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  block = CappedShared(block);
  while (*stages > 0 && S::SharedBytes(*stages) > block) --*stages;
  return error;
}

template <int kHead, typename T, bool kExtras>
int LaunchSm80(const AttentionParams& params, void* stream) {
  using S = Shape<kHead, kExtras>;
  Sm80Params copy;
  copy.attention = params;
  const cudaError_t error = StagesOf<kHead, kExtras>(&copy.stages);
  if (error != cudaSuccess) return static_cast<int>(error);
  const int64_t items = static_cast<int64_t>(params.B) * params.H * ((params.S + S::kM - 1) / S::kM);
  return LaunchKernel<Sm80Params, AttentionKernel<kHead, T, kExtras>>(copy, static_cast<unsigned>(items), S::kThreads,
                                                                      S::SharedBytes(copy.stages), stream);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_CUH_
