// SPDX-License-Identifier: Apache-2.0
// Split-KV decode attention, compute capability 8.0 and later, bound by reading keys and values. The query heads of a
// KV head are packed into one tile (GQA packing), so that a key is read once for all of them. CTAs split the keys of a
// row block ("split-KV", Dao et al. 2023), and a combine kernel follows. For short sequences on 9.0 there is
// cuda/attention/decode/cluster.cuh.
//
// Keys and values go from memory to registers 16 bytes at a time, without shared memory. The matmuls are transposed,
// scores^T = K Q^T and output^T = V^T weights^T, so that eight query rows fill the narrow side of the tensor cores. The
// k-indices of both operands are permuted alike, so that what a lane has loaded is its operand. fp32 takes three TF32
// matmuls, as a number is the sum of two TF32 values.
//
// Quantized keys and values (int8, fp8) become fp16 or bf16 behind the load, exactly. Their scales are folded into
// queries and scores, and into the output.
//
// Over 500 lines: one class, whose members share registers.
#ifndef STOF_CUDA_ATTENTION_DECODE_SPLITKV_CUH_
#define STOF_CUDA_ATTENTION_DECODE_SPLITKV_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/decode/column_list.cuh"
#include "cuda/attention/decode/common.cuh"
#include "cuda/attention/decode/load_once.cuh"
#include "cuda/attention/decode/splitkv_shape.cuh"
#include "cuda/attention/decode/warp_pages.cuh"
#include "cuda/attention/sm80/shape.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/quantized.cuh"

namespace stof {
namespace cuda {

// Where the kernel reads keys and values.
enum class KeySource {
  kCache,    // rows one behind the other
  kColumns,  // likewise, with key columns beside the key range (key_range.h)
  // Pages (DecodeParams::pages). A page holds 16 rows or more, those that a warp loads at once. Their page is looked up
  // a step ahead.
  kPages,
  // The pages of a cache that each KV head has chosen, with a table for each. Keys count as if those of the other pages
  // did not exist; left_out_ many lie before the pages with new rows, all of which are chosen.
  kChosenPages
};

template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
class Decode {
  using S = DecodeShape<kHead, T, Stored, kBlocks>;
  static constexpr bool kFloat = sizeof(T) == 4;
  static constexpr bool kQuantized = sizeof(Stored) == 1;
  static constexpr bool kColumns = kSource == KeySource::kColumns, kChosen = kSource == KeySource::kChosenPages;
  static constexpr bool kPaged = kSource == KeySource::kPages || kChosen;
  static constexpr int kScores = S::kGroups;

 public:
  struct Shared {
    uint4 query[kBlocks][S::kQueryChunks][32];  // in the order of the lanes
    float output[S::kWarps][S::kRows][kHead];
    float maximum[S::kWarps][S::kRows], sum[S::kWarps][S::kRows];
    float top[S::kRows], total[S::kRows];
  };

  __device__ Decode(const DecodeParams& params, Shared& shared)
      : params_(params), p_(params.attention), shared_(shared) {
    const int rows = params.heads * p_.S, blocks = (rows + S::kRows - 1) / S::kRows;
    const int parts = p_.H / p_.G / params.heads;
    int at = blockIdx.x;
    block_ = at % blocks;
    at /= blocks;
    const int part = at % parts;
    at /= parts;
    split_ = at % params.splits;
    at /= params.splits;
    const int g = at % p_.G;
    b_ = at / p_.G;
    head0_ = g * (p_.H / p_.G) + part * params.heads;
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    key_ = static_cast<const Stored*>(p_.key) + b_ * p_.key_stride.b + g * p_.key_stride.h;
    value_ = static_cast<const Stored*>(p_.value) + b_ * p_.value_stride.b + g * p_.value_stride.h;
    if (!CanReadAhead(params)) Wait();
    if constexpr (kChosen) {
      table_ = b_ * p_.G + g;
      left_out_ = ReadWord(params.left_out + table_);
      keys_ = p_.T - left_out_;
    } else if constexpr (kPaged) {
      table_ = b_;
      keys_ = max(0, min(p_.T, params.key_ends[b_]));
    }
    const int tiles = (Keys() + kTileKeys - 1) / kTileKeys;
    pad_ = p_.pad_bits == nullptr || params.second_pass != 0 ? nullptr
                                                             : p_.pad_bits + static_cast<int64_t>(b_) * tiles * 2;
    masked_ = p_.has_mask != 0 && params.second_pass == 0;
    int begin = 0, end = tiles;
    if (HasRange()) {
      full_ = MakeKeyRange(ReadFirstRow(params, b_) - left_out_, params.window_left, Keys()).first;
      FindTiles(range(), p_.S, Keys(), &begin, &end);
      if constexpr (kColumns) columns_.Find(params.columns, g, &begin, &end);
    } else if (masked_) {
      const DeviceMask& mask = p_.mask;
      const int table = mask.layout[LayoutPlace(params, b_, head0_)];
      begin = mask.row_ptr[table * mask.rows];
      full_ = mask.full_begin[table * mask.rows];
      end = mask.row_end[table * mask.rows];
    }
    // The range may be far shorter than the length for which the host chose the splits: its tiles are divided evenly.
    const int share = (end - begin) / params.splits, more = (end - begin) % params.splits;
    next_ = begin + split_ * share + min(split_, more);
    end_ = next_ + share + (split_ < more ? 1 : 0);
    has_tiles_ = next_ < end_;
    next_ += warp_ / S::kWarpsPerTile;
    first_key_ = warp_ % S::kWarpsPerTile * 16 * S::kGroups;
    scale_ = HasScoreMod(p_) ? p_.scale : p_.scale * kLog2E;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(block_ * S::kRows + 8 * n + lane_ % 4 * 2 + r, rows - 1);
        head_[n][r] = head0_ + row / p_.S;
        query_[n][r] = row % p_.S;
      }
    }
  }

  __device__ void Run() {
    if (params_.second_pass != 0 && !HasEmptyRow()) return;
    Entry entry = Next();
    // Keys that the previous kernel does not write are in flight while it runs.
    if (!IsBeforeNewKeys(entry)) Wait();
    FetchKeys(entry, 0);
    FetchKeys(entry, 1);
    Wait();
    if (params_.split_output != nullptr && !has_tiles_) return StoreNoKeys();
    LoadQueries();
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      max_[n][0] = max_[n][1] = -INFINITY;
      sum_[n][0] = sum_[n][1] = 0.0f;
#pragma unroll
      for (int j = 0; j < S::kOutputs; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[n][j][e] = 0.0f;
      }
    }
    __syncthreads();
    while (entry.tile >= 0) {
      const Entry next = Next();
      float s[kScores][kBlocks][4];
#pragma unroll
      for (int g = 0; g < kScores; ++g) {
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[g][n][e] = 0.0f;
        }
      }
      Scores(0, s[0]);
      FetchValues(entry, 0);
      Scores(1, s[kScores - 1]);
      FetchValues(entry, 1);
      ApplyMaskAndBias(entry, s);
      Softmax(s);
      AddValues(0, s[0]);
      FetchKeys(next, 0);
      AddValues(1, s[kScores - 1]);
      FetchKeys(next, 1);
      entry = next;
    }
    CombineWarps();
  }

 private:
  __device__ int64_t RowOf(int row) const { return PackedRow(p_, b_, head0_, row); }
  // The number of keys of the sequence.
  __device__ __forceinline__ int Keys() const { return kPaged ? keys_ : p_.T; }
  __device__ __forceinline__ bool HasRange() const { return params_.first_rows != nullptr; }
  // With chosen pages, a range of the keys that exist, which has no window: FromWindow is about that.
  __device__ __forceinline__ KeyRange range() const {
    return {full_, kChosen ? kNoWindow : params_.window_left, kColumns ? params_.window_block : 1};
  }
  __device__ bool HasEmptyRow() const {
    for (int i = 0; i < S::kRows; ++i) {
      const int row = block_ * S::kRows + i;
      if (row < params_.heads * p_.S && params_.empty_rows[RowOf(row)] != 0) return true;
    }
    return false;
  }

  // Waits for the previous kernel, then lets the next one start. The next kernel may read ahead, too: so all CTAs wait.
  static __device__ __forceinline__ void Wait() {
    WaitForPrevious();
    LetNextStart();
  }

  // ---- KV tiles ----
  struct Entry {
    int tile = -1;                // -1: none is left
    int bits = -1;                // index of its element mask; -1: every key
    uint32_t pad = ~0u;           // of the 32 keys around those of the warp: which exist and are no padding
    WarpPages<S::kGroups> pages;  // kPaged
  };
  // The address of a key or value row of the group that fills a buffer.
  __device__ __forceinline__ const Stored* RowAt(const Stored* head, int64_t stride, const Entry& entry, int buffer,
                                                 int key) const {
    if constexpr (kPaged) {
      return head + entry.pages.OffsetOf(params_.pages, S::kHalfBuffers ? 0 : buffer, key, stride);
    } else {
      return head + key * stride;
    }
  }
  __device__ __forceinline__ Entry Next() {
    Entry entry;
    while (next_ < end_) {
      const int at = next_;
      next_ += S::kTilesAtOnce;
      if constexpr (kColumns) {
        if (at < columns_.entries.tiles) {
          entry.bits = -1;
          entry.tile = columns_.ReadEntry(params_.columns.gathers != 0, at, first_key_ / 32 * 32, &entry.pad);
          if (entry.pad == 0) continue;
          return entry;
        }
        entry.tile = columns_.RangeTile(at);
        entry.bits = IsFullTile(range(), p_.S, entry.tile) ? -1 : 0;
        entry.pad = ~0u;
      } else if (masked_) {
        entry.tile = p_.mask.key_tile[at];
        entry.bits = at < full_ ? p_.mask.bits_id[at] : -1;
      } else {
        entry.tile = at;
        if (HasRange()) entry.bits = IsFullTile(range(), p_.S, at) ? -1 : 0;
      }
      const int key = entry.tile * kTileKeys + first_key_ / 32 * 32;
      if (pad_ != nullptr) {
        entry.pad = pad_[2 * entry.tile + first_key_ / 32];
        if (entry.pad == 0) continue;
      } else if (const int keys = HasRange() ? EndOfKeys(range(), p_.S, Keys()) : Keys(); key + 32 > keys) {
        if (key >= keys) continue;
        entry.pad = (1u << (keys - key)) - 1u;
      }
      if constexpr (kPaged) {
        entry.pages.template Find<kChosen>(params_.pages, table_, entry.tile * kTileKeys + first_key_, keys_);
      }
      if constexpr (kChosen) {
        if (RowOfKey(entry, 0, first_key_) < full_ + left_out_ + p_.S - 1 - params_.window_left) entry.bits = 0;
      }
      return entry;
    }
    entry.tile = -1;
    return entry;
  }

  // Whether all keys of an entry, and what shares a memory sector with them, lie before the new ones.
  __device__ __forceinline__ bool IsBeforeNewKeys(const Entry& entry) const {
    return (kColumns && entry.tile >= kGathered) || !HasRange() || entry.tile * kTileKeys + kTileKeys < full_;
  }

  // The row of the cache that has the key at a place of a group of 16 keys.
  __device__ __forceinline__ int RowOfKey(const Entry& entry, int group, int place) const {
    const int key = entry.tile * kTileKeys + place;
    if constexpr (kChosen) return entry.pages.RowOf(params_.pages, group, key);
    return key;
  }
  // kChosenPages: which of the 32 keys around those of the warp are not before the window of a query.
  __device__ __forceinline__ uint32_t FromWindow(const Entry& entry, int query) const {
    uint32_t bits = ~0u;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      const int place = first_key_ + 16 * g;
      const int before = full_ + left_out_ + query - params_.window_left - RowOfKey(entry, g, place);
      if (before > 0) bits &= ~((before < 16 ? (1u << before) - 1u : 0xffffu) << place % 32);
    }
    return bits;
  }

  // The key at a place of an entry, whose bit of pad is set.
  __device__ __forceinline__ int KeyAt(const Entry& entry, int place, bool is_there) const {
    if constexpr (kColumns) return is_there ? columns_.KeyAt(entry.tile, place) : 0;
    return entry.tile * kTileKeys + place;
  }

  // ---- memory ----
  // The scale of element d of the KV head.
  __device__ __forceinline__ float ScaleOf(const KvScale& scale, int d) const {
    return scale.data[head0_ / (p_.H / p_.G) * scale.stride_g + d * scale.stride_d];
  }
  // The largest scale of the keys, which the scores are multiplied by. The queries take what the others are of it: no
  // product leaves the range of T.
  __device__ float FindLargestKeyScale() const {
    if (params_.key_scale.stride_d == 0) return ScaleOf(params_.key_scale, 0);
    float largest = 0.0f;
    for (int d = lane_; d < p_.D; d += 32) largest = fmaxf(largest, fabsf(ScaleOf(params_.key_scale, d)));
#pragma unroll
    for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    return largest > 0.0f ? largest : 1.0f;
  }
  __device__ void ScaleQuery(float largest, int d, uint32_t (&x)[4]) const {
    auto* const query = reinterpret_cast<T*>(x);
#pragma unroll
    for (int e = 0; e < S::kPerQueryLoad; ++e) {
      query[e] = FromFloat<T>(ToFloat(query[e]) * (ScaleOf(params_.key_scale, d + e) / largest));
    }
  }
  __device__ void LoadQueries() {
    const int rows = params_.heads * p_.S;
    float largest = 1.0f;
    if constexpr (kQuantized) {
      largest = FindLargestKeyScale();
      scale_ *= largest;
    }
    for (int at = warp_; at < kBlocks * S::kQueryChunks; at += S::kWarps) {
      const int n = at / S::kQueryChunks, c = at % S::kQueryChunks;
      // The elements that a lane has of a chunk of keys are neighbours.
      const int row = block_ * S::kRows + 8 * n + lane_ / 4;
      const int d =
          S::kPerLoad * (4 * (c / S::kQueriesPerLoad) + lane_ % 4) + S::kPerQueryLoad * (c % S::kQueriesPerLoad);
      const bool valid = row < rows && d < p_.D;
      const T* from = static_cast<const T*>(p_.query) + b_ * p_.query_stride.b;
      if (valid) from += (head0_ + row / p_.S) * p_.query_stride.h + row % p_.S * p_.query_stride.s + d;
      uint32_t x[4];
      LoadOnce(x, from, valid);
      if constexpr (kQuantized) {
        if (valid && params_.key_scale.stride_d != 0) ScaleQuery(largest, d, x);
      }
      shared_.query[n][c][lane_] = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  // Lane l loads chunks l % 4, l % 4 + 4, ... of keys l / 4 and l / 4 + 8.
  __device__ __forceinline__ void FetchKeys(const Entry& entry, int buffer) {
    if (entry.tile < 0) return;
    const int place = first_key_ + (S::kHalfBuffers ? 0 : 16 * buffer) + lane_ / 4;
    const uint32_t there = entry.pad >> place % 32;
    const int chunk0 = S::kHalfBuffers ? buffer * S::kChunks : 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = KeyAt(entry, place + 8 * i, (there >> 8 * i & 1u) != 0);
      const Stored* row = RowAt(key_, p_.key_stride.s, entry, buffer, key);
#pragma unroll
      for (int c = 0; c < S::kChunks; ++c) {
        const int d = S::kPerLoad * (4 * (chunk0 + c) + lane_ % 4);
        LoadOnce(buffer_[buffer][i * S::kChunks + c], row + d, (there >> 8 * i & 1u) != 0 && d < p_.D);
      }
    }
  }
  // The i-th key whose values lane l loads, of which it has chunks l / 4, l / 4 + 8, ...
  __device__ __forceinline__ int ValueKey(int i) const {
    return kFloat ? 4 * i + lane_ % 4 : 2 * (lane_ % 4) + i % 2 + i / 2 * 8;
  }
  __device__ __forceinline__ void FetchValues(const Entry& entry, int buffer) {
    const int place = first_key_ + (S::kHalfBuffers ? 0 : 16 * buffer);
    const uint32_t there = entry.pad >> place % 32;
    constexpr int kWide = S::kChunks / 2;
    const int chunk0 = S::kHalfBuffers ? buffer * kWide : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = KeyAt(entry, place + ValueKey(i), (there >> ValueKey(i) & 1u) != 0);
      const Stored* row = RowAt(value_, p_.value_stride.s, entry, buffer, key);
#pragma unroll
      for (int c = 0; c < kWide; ++c) {
        const int d = S::kPerLoad * (8 * (chunk0 + c) + lane_ / 4);
        LoadOnce(buffer_[buffer][i * kWide + c], row + d, (there >> ValueKey(i) & 1u) != 0 && d < p_.Dv);
      }
    }
  }

  // ---- matmuls ----
  __device__ __forceinline__ void Scores(int buffer, float (&s)[kBlocks][4]) {
    constexpr int kSteps = 2 * S::kQueriesPerLoad;  // matmuls for a load
    const int chunk0 = S::kHalfBuffers ? buffer * S::kChunks : 0;
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      const uint32_t (&low)[S::kWords] = buffer_[buffer][c];
      const uint32_t (&high)[S::kWords] = buffer_[buffer][S::kChunks + c];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4], big[4], small[4];
        if constexpr (kQuantized) {
          uint32_t upper[2], lower[2];
          Unpack<T, Stored>::Run(low[step], upper);
          Unpack<T, Stored>::Run(high[step], lower);
          a[0] = upper[0], a[1] = lower[0], a[2] = upper[1], a[3] = lower[1];
        } else {
          a[0] = low[2 * step], a[1] = high[2 * step], a[2] = low[2 * step + 1], a[3] = high[2 * step + 1];
        }
        if constexpr (kFloat) {
#pragma unroll
          for (int e = 0; e < 4; ++e) SplitTf32(a[e], &big[e], &small[e]);
        }
        const int chunk = (chunk0 + c) * S::kQueriesPerLoad + step / 2;
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          const uint2 q = reinterpret_cast<const uint2*>(&shared_.query[n][chunk][lane_])[step % 2];
          if constexpr (kFloat) {
            uint32_t query_big[2], query_small[2];
            SplitTf32(q.x, &query_big[0], &query_small[0]);
            SplitTf32(q.y, &query_big[1], &query_small[1]);
            MmaTf32(s[n], small, query_big);
            MmaTf32(s[n], big, query_small);
            MmaTf32(s[n], big, query_big);
          } else {
            Mma<T>(s[n], a, q.x, q.y);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void AddValues(int buffer, const float (&s)[kBlocks][4]) {
    constexpr int kWide = S::kChunks / 2;
    const int chunk0 = S::kHalfBuffers ? buffer * kWide : 0;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if constexpr (kFloat) {
        // Lane 4 (k % 8) + r / 2 has the weights of key k and row r; lane l needs keys l % 4 + 4 i and row l / 4.
        uint32_t big[2][2], small[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int from = (i % 2 * 4 + lane_ % 4) * 4 + lane_ / 8;
          const float even = __shfl_sync(~0u, s[n][i / 2 * 2], from), odd = __shfl_sync(~0u, s[n][i / 2 * 2 + 1], from);
          SplitTf32(__float_as_uint(lane_ / 4 % 2 == 0 ? even : odd), &big[i / 2][i % 2], &small[i / 2][i % 2]);
        }
#pragma unroll
        for (int c = 0; c < kWide; ++c) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            // Tensor cores round sums towards zero: short sums, added in fp32 arithmetic.
            float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t (&first)[4] = buffer_[buffer][2 * i * kWide + c];
              const uint32_t (&second)[4] = buffer_[buffer][(2 * i + 1) * kWide + c];
              uint32_t value_big[4], value_small[4];
              SplitTf32(first[2 * j], &value_big[0], &value_small[0]);
              SplitTf32(first[2 * j + 1], &value_big[1], &value_small[1]);
              SplitTf32(second[2 * j], &value_big[2], &value_small[2]);
              SplitTf32(second[2 * j + 1], &value_big[3], &value_small[3]);
              MmaTf32(sum, value_small, big[i]);
              MmaTf32(sum, value_big, small[i]);
              MmaTf32(sum, value_big, big[i]);
            }
#pragma unroll
            for (int e = 0; e < 4; ++e) o_[n][2 * (chunk0 + c) + j][e] += sum[e];
          }
        }
      } else {
        const uint32_t b0 = Transpose(Pack<T>(s[n][0], s[n][1])), b1 = Transpose(Pack<T>(s[n][2], s[n][3]));
#pragma unroll
        for (int c = 0; c < kWide; ++c) {
#pragma unroll
          for (int pair = 0; pair < S::kPerLoad / 4; ++pair) {  // two blocks of 16 outputs
            uint32_t x[4][2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const uint32_t (&loaded)[S::kWords] = buffer_[buffer][i * kWide + c];
              if constexpr (kQuantized) {
                Unpack<T, Stored>::Run(loaded[pair], x[i]);
              } else {
                x[i][0] = loaded[2 * pair], x[i][1] = loaded[2 * pair + 1];
              }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              uint32_t a[4];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                a[2 * i] = __byte_perm(x[2 * i][j], x[2 * i + 1][j], 0x5410);
                a[2 * i + 1] = __byte_perm(x[2 * i][j], x[2 * i + 1][j], 0x7632);
              }
              Mma<T>(o_[n][S::kPerLoad / 2 * (chunk0 + c) + 2 * pair + j], a, b0, b1);
            }
          }
        }
      }
    }
  }

  // ---- scores to weights; element e: key lane / 4 + 8 (e / 2), row 2 (lane % 4) + e % 2 ----
  __device__ __forceinline__ void ApplyMaskAndBias(const Entry& entry, float (&s)[kScores][kBlocks][4]) {
    const bool mean = params_.second_pass != 0 && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kMean;
    const bool score_mod = HasScoreMod(p_);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      uint32_t word[2] = {entry.pad, entry.pad};
      if (entry.bits >= 0 && HasRange()) {
        const int key = entry.tile * kTileKeys + first_key_ / 32 * 32;
        uint32_t columns = 0;
        if constexpr (kColumns) columns = columns_.BitsOfTile(entry.tile, first_key_);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t own = BitsOfKeys(range(), query_[n][r], key);
          if constexpr (kColumns) own |= columns & BitsUpToQuery(range(), query_[n][r], key);
          if constexpr (kChosen) own &= FromWindow(entry, query_[n][r]);
          word[r] &= own;
        }
      } else if (entry.bits >= 0) {
        const uint32_t* bits = p_.mask.bits + static_cast<int64_t>(entry.bits) * kDecodeTileRows * 2 + first_key_ / 32;
        word[0] &= __ldg(bits + 2 * MaskRow(params_, head_[n][0] - head0_, query_[n][0]));
        word[1] &= __ldg(bits + 2 * MaskRow(params_, head_[n][1] - head0_, query_[n][1]));
      }
#pragma unroll
      for (int g = 0; g < kScores; ++g) {
        const int offset = first_key_ + 16 * g + lane_ / 4;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[g][n][e];
          x = __fmul_rn(x, scale_);
          if (score_mod) {
            x = ApplyScoreMod<T>(p_, x, b_, head_[n][e % 2], query_[n][e % 2], RowOfKey(entry, g, offset + e / 2 * 8));
          }
          if (mean) x = 0.0f;
          if ((word[e % 2] >> ((offset + e / 2 * 8) % 32) & 1u) == 0) x = -INFINITY;
        }
      }
    }
  }

  __device__ __forceinline__ void Softmax(float (&s)[kScores][kBlocks][4]) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float high = max_[n][r];
#pragma unroll
        for (int g = 0; g < kScores; ++g) high = fmaxf(high, fmaxf(s[g][n][r], s[g][n][2 + r]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
        if (high > max_[n][r]) {
          const float factor = max_[n][r] == -INFINITY ? 0.0f : Exp2(max_[n][r] - high);
          max_[n][r] = high;
          sum_[n][r] *= factor;
#pragma unroll
          for (int j = 0; j < S::kOutputs; ++j) o_[n][j][r] *= factor, o_[n][j][2 + r] *= factor;
        }
        const float base = max_[n][r] == -INFINITY ? 0.0f : max_[n][r];
#pragma unroll
        for (int g = 0; g < kScores; ++g) {
#pragma unroll
          for (int e = r; e < 4; e += 2) {
            s[g][n][e] = Exp2(s[g][n][e] - base);
            sum_[n][r] += s[g][n][e];
          }
        }
      }
    }
  }

  // ---- epilogue ----
  // Stores the statistics of a split without a tile. The combine kernel then reads no output of it.
  __device__ void StoreNoKeys() const {
    const int rows = min(S::kRows, params_.heads * p_.S - block_ * S::kRows);
    for (int row = threadIdx.x; row < rows; row += S::kThreads) {
      const int64_t part = RowOf(block_ * S::kRows + row) * params_.splits + split_;
      params_.split_stats[2 * part] = -INFINITY, params_.split_stats[2 * part + 1] = 0.0f;
    }
  }

  // Combines the warps.
  __device__ void CombineWarps() {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sum_[n][r];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int row = 8 * n + lane_ % 4 * 2 + r;
        if (lane_ < 4) shared_.maximum[warp_][row] = max_[n][r], shared_.sum[warp_][row] = sum;
#pragma unroll
        for (int j = 0; j < S::kOutputs; ++j) {
          constexpr int kBlocksOfChunk = S::kPerLoad / 2;
          const int d = 8 * S::kPerLoad * (j / kBlocksOfChunk) + S::kPerLoad * (lane_ / 4) + j % kBlocksOfChunk * 2;
          *reinterpret_cast<float2*>(&shared_.output[warp_][row][d]) = make_float2(o_[n][j][r], o_[n][j][2 + r]);
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < S::kRows) {
      const int row = threadIdx.x;
      float top = -INFINITY, total = 0.0f;
      for (int w = 0; w < S::kWarps; ++w) top = fmaxf(top, shared_.maximum[w][row]);
      for (int w = 0; w < S::kWarps; ++w) {
        const float maximum = shared_.maximum[w][row];
        const float weight = maximum == -INFINITY ? 0.0f : Exp2(maximum - top);
        total += shared_.sum[w][row] * weight;
        shared_.maximum[w][row] = weight;
      }
      shared_.top[row] = top;
      shared_.total[row] = total;
    }
    __syncthreads();
    const int rows = min(S::kRows, params_.heads * p_.S - block_ * S::kRows);
    const bool is_invalid = params_.split_output == nullptr && ReadInvalid(params_, b_) != 0;
    for (int at = threadIdx.x; at < rows * p_.Dv; at += S::kThreads) {
      const int row = at / p_.Dv, d = at % p_.Dv;
      float x = 0.0f;
#pragma unroll
      for (int w = 0; w < S::kWarps; ++w) x += shared_.output[w][row][d] * shared_.maximum[w][row];
      const int whole = block_ * S::kRows + row;
      if constexpr (kQuantized) x *= ScaleOf(params_.value_scale, d);
      const float total = shared_.total[row], top = shared_.top[row];
      if (params_.split_output != nullptr) {
        const int64_t part = RowOf(whole) * params_.splits + split_;
        params_.split_output[part * p_.Dv + d] = x;
        if (d == 0) params_.split_stats[2 * part] = top, params_.split_stats[2 * part + 1] = total;
        continue;
      }
      const int h = head0_ + whole / p_.S;
      T* to = static_cast<T*>(p_.output) + b_ * p_.output_stride.b + h * p_.output_stride.h +
              whole % p_.S * p_.output_stride.s;
      const float row_sum = is_invalid ? NAN : total == 0.0f ? 0.0f : total + SinkWeight<T>(p_, h, top);
      if (d == 0) StoreLse<T>(p_, b_, h, whole % p_.S, top, row_sum);
      to[d] = FromFloat<T>(total == 0.0f && !is_invalid ? EmptyValue(p_) : x / row_sum);
    }
  }

  const DecodeParams& params_;
  const AttentionParams& p_;
  Shared& shared_;
  ColumnList columns_;
  int b_, head0_, block_, split_, warp_, lane_, next_, end_, first_key_;
  int keys_ = 0;  // kPaged: of the sequence; kChosenPages: of all pages, without those left out
  int table_ = 0, left_out_ = 0;
  int full_ = 0;  // where the entries of full tiles begin; with a key range its `first`, to save a register
  bool masked_, has_tiles_;
  float scale_;
  const Stored *key_, *value_;
  const uint32_t* pad_;
  int head_[kBlocks][2], query_[kBlocks][2];
  uint32_t buffer_[2][S::kLoads][S::kWords];
  float o_[kBlocks][S::kOutputs][4];
  float max_[kBlocks][2], sum_[kBlocks][2];
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_SPLITKV_CUH_
