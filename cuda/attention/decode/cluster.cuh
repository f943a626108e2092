// SPDX-License-Identifier: Apache-2.0
// Decode attention over short sequences, compute capability 9.0, where reading the keys takes less time than launches,
// memory latency and a combine kernel. The CTAs that split the keys of a row block are a cluster and combine through
// each other's shared memory. Rows are packed as in cuda/attention/decode/splitkv.cuh.
//
// A warp copies to shared memory what it multiplies itself: a ring of stages, each 16 keys or their values. All stages
// are in flight from the start, without a barrier of the CTA. A stage is read in memory order and stored lane by lane,
// so that each lane finds its operands in 16 bytes.
// The matmuls are transposed, scores^T = K Q^T and output^T = V^T weights^T, so that eight query rows fill the narrow
// side of the tensor cores. The k-indices of both operands are permuted alike, so that 16 bytes of memory are an
// operand. fp32 takes three TF32 matmuls, as a number is the sum of two TF32 values.
#ifndef STOF_CUDA_ATTENTION_DECODE_CLUSTER_CUH_
#define STOF_CUDA_ATTENTION_DECODE_CLUSTER_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/cluster_shape.cuh"
#include "cuda/attention/decode/column_list.cuh"
#include "cuda/attention/decode/common.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {

// kColumns: key columns beside the key range (key_range.h).
template <int kHead, typename T, int kBlocks, bool kColumns>
class ClusterDecode {
  using S = ClusterShape<kHead, T, kBlocks>;
  static constexpr bool kFloat = sizeof(T) == 4;

 public:
  __device__ ClusterDecode(const DecodeParams& params, char* shared)
      : params_(params), p_(params.attention), shared_(shared) {
    const int rows = params.heads * p_.S, blocks = (rows + S::kRows - 1) / S::kRows;
    const int parts = p_.H / p_.G / params.heads;
    int at = blockIdx.x;
    split_ = at % params.splits;  // rank in the cluster
    at /= params.splits;
    block_ = at % blocks;
    at /= blocks;
    const int part = at % parts;
    at /= parts;
    const int g = at % p_.G;
    b_ = at / p_.G;
    head0_ = g * (p_.H / p_.G) + part * params.heads;
    rows_ = min(S::kRows, rows - block_ * S::kRows);
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
    first_ = warp_ * S::kWarpKeys % kTileKeys;
    key_ = static_cast<const T*>(p_.key) + b_ * p_.key_stride.b + g * p_.key_stride.h;
    value_ = static_cast<const T*>(p_.value) + b_ * p_.value_stride.b + g * p_.value_stride.h;
    padded_ = p_.pad_bits != nullptr && params.second_pass == 0;
    masked_ = p_.has_mask != 0 && params.second_pass == 0;
    scale_ = HasScoreMod(p_) ? p_.scale : p_.scale * kLog2E;
    keys_ = p_.T;
    const auto base = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    ring_ = base + static_cast<uint32_t>(S::kRing + warp_ * S::kStages * S::kStageBytes);
    queries_ = base + S::kQueries;
    steps_ = base + static_cast<uint32_t>(4 * warp_ * S::kStepSlots * S::kStepWords);
  }

  __device__ void Run() {
    const bool reads_ahead = CanReadAhead(params_);
    if (!reads_ahead) WaitForPrevious();
    FindSplit();
    if (reads_ahead) {
      PrefetchTiles();
      WaitForPrevious();
    }
    LetNextStart();
    if (params_.second_pass != 0 && !HasEmptyRow()) return;  // uniform in a cluster
    if (params_.splits > 1) ArriveAtCluster();               // tells the others that this CTA runs
    CopyQueries();
    ReadTiles(next_, &current_tiles_);
    ReadTiles(next_ + kStride, &next_tiles_);
    live_tiles_ = LiveTiles(current_tiles_, next_);
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
    // One loop for the prologue, which has nothing to multiply yet, and the main part: the code has to fit the
    // instruction cache.
    constexpr int kAhead = (S::kStages + 1) / 2;
    for (int step = -kAhead;; ++step) {
      float s[kBlocks][4];
      if (step == 0) {
        AwaitCopies<S::kStages - 1>();
        __syncthreads();  // the queries have arrived
      }
      if (step >= 0 && step >= loaded_) break;
      if (step >= 0) {
        AwaitCopies<S::kStages - 1>();
        Scores(s);
      }
      if (!S::kOdd || step > -kAhead) LoadStage<!S::kOdd>();
      if (step >= 0) {
        ApplyMaskAndBias(step, s);
        Softmax(s);
        AwaitCopies<S::kStages - 1>();
        AddValues(s);
      }
      LoadStage<S::kOdd>();
    }
    CombineWarps();
  }

 private:
  __device__ int64_t RowOf(int row) const { return PackedRow(p_, b_, head0_, row); }
  __device__ __forceinline__ bool HasRange() const { return params_.first_rows != nullptr; }
  __device__ bool HasEmptyRow() const {
    for (int i = 0; i < rows_; ++i) {
      if (params_.empty_rows[RowOf(block_ * S::kRows + i)] != 0) return true;
    }
    return false;
  }
  // The head and query of a packed row; rows out of bounds repeat the last one.
  __device__ __forceinline__ void HeadAndQuery(int row, int* head, int* query) const {
    const int whole = block_ * S::kRows + min(row, rows_ - 1);
    *head = head0_ + whole / p_.S;
    *query = whole % p_.S;
  }

  // ---- KV tiles ----
  // A KV tile of the tile row. The lanes of a warp hold 32 of them, and the next 32 are in flight.
  struct Tile {
    int tile;
    int bits;       // index of its element mask; -1: every key
    uint32_t keys;  // a bit for each of the 16 keys of the warp that exists and is not padding
  };
  __device__ void FindSplit() {
    int begin = 0, end = (p_.T + kTileKeys - 1) / kTileKeys;
    if (HasRange()) {
      range_ = MakeKeyRange(ReadFirstRow(params_, b_), params_.window_left, p_.T, kColumns ? params_.window_block : 1);
      FindTiles(range_, p_.S, p_.T, &begin, &end);
      keys_ = EndOfKeys(range_, p_.S, p_.T);
      if constexpr (kColumns) columns_.Find(params_.columns, head0_ / (p_.H / p_.G), &begin, &end);
    } else if (masked_) {
      begin = params_.row_begin, full_ = params_.row_full, end = params_.row_end;
      if (begin < 0) {
        const DeviceMask& mask = p_.mask;
        const int table = mask.layout[LayoutPlace(params_, b_, head0_)] * mask.rows;
        begin = mask.row_ptr[table];
        full_ = mask.full_begin[table];
        end = mask.row_end[table];
      }
    }
    const int count = end - begin;
    const int share = count / params_.splits, more = count % params_.splits;
    next_ = begin + split_ * share + min(split_, more);
    end_ = next_ + share + (split_ < more ? 1 : 0);
    next_ += warp_ * S::kWarpKeys / kTileKeys;
  }
  static constexpr int kStride = 32 * S::kTilesAtOnce;
  __device__ __forceinline__ void ReadTiles(int next, Tile* found) const {
    const int at = next + S::kTilesAtOnce * lane_;
    found->tile = at, found->bits = -1, found->keys = 0;
    if (at >= end_) return;
    if constexpr (kColumns) {
      if (at < columns_.entries.tiles) {
        uint32_t keys;
        found->tile = columns_.ReadEntry(params_.columns.gathers != 0, at, first_ / 32 * 32, &keys);
        found->keys = keys >> first_ % 32 & 0xffffu;
        return;
      }
      found->tile = columns_.RangeTile(at);
      found->bits = IsFullTile(range_, p_.S, found->tile) ? -1 : 0;
    } else if (HasRange()) {
      found->bits = IsFullTile(range_, p_.S, at) ? -1 : 0;
    } else if (masked_) {
      found->tile = ReadWord(p_.mask.key_tile + at);
      if (at < full_) found->bits = ReadWord(p_.mask.bits_id + at);
    }
    if (padded_) {
      const int64_t words = (p_.T + kTileKeys - 1) / kTileKeys * 2;
      const auto* bits = reinterpret_cast<const int32_t*>(p_.pad_bits + b_ * words + 2 * found->tile + first_ / 32);
      found->keys = static_cast<uint32_t>(ReadWord(bits)) >> first_ % 32 & 0xffffu;
    } else {
      const int left = keys_ - found->tile * kTileKeys - first_;
      found->keys = left >= S::kWarpKeys ? 0xffffu : left <= 0 ? 0u : (1u << left) - 1u;
    }
  }
  // A bit for each of 32 tiles that exists and, with padding, has some key. Without padding nothing is waited for.
  __device__ __forceinline__ uint32_t LiveTiles(const Tile& tiles, int first) const {
    const int count = (end_ - first + S::kTilesAtOnce - 1) / S::kTilesAtOnce;
    const uint32_t there = count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1u;
    return padded_ || kColumns ? there & __ballot_sync(~0u, tiles.keys != 0) : there;
  }
  // Advances to the next KV tile; tile_ -1: there is none.
  __device__ __forceinline__ void AdvanceTile() {
    while (live_tiles_ == 0) {
      next_ += kStride;
      if (next_ >= end_) {
        tile_ = -1;
        return;
      }
      current_tiles_ = next_tiles_;
      live_tiles_ = LiveTiles(current_tiles_, next_);
      ReadTiles(next_ + kStride, &next_tiles_);
    }
    const int from = __ffs(static_cast<int>(live_tiles_)) - 1;
    live_tiles_ &= live_tiles_ - 1;
    tile_ = __shfl_sync(~0u, current_tiles_.tile, from);
    const int bits = masked_ || HasRange() ? __shfl_sync(~0u, current_tiles_.bits, from) : -1;
    const uint32_t keys = __shfl_sync(~0u, current_tiles_.keys, from);
    const uint32_t to = steps_ + static_cast<uint32_t>(4 * (loaded_ % S::kStepSlots) * S::kStepWords);
    ++loaded_;
    if (lane_ == 0) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %3};" ::"r"(to), "r"(tile_), "r"(bits), "r"(keys) : "memory");
    }
    if (bits >= 0 && lane_ < S::kRows) {
      int head = 0, query = 0;
      HeadAndQuery(lane_, &head, &query);
      const uint32_t own = to + static_cast<uint32_t>(16 + 4 * lane_);
      if (HasRange()) {
        const int key = tile_ * kTileKeys + first_ / 32 * 32;
        uint32_t allowed = BitsOfKeys(range_, query, key);
        if constexpr (kColumns) {
          allowed |= columns_.BitsOfTile(tile_, first_) & BitsUpToQuery(range_, query, key);
        }
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(own), "r"(allowed) : "memory");
      } else {
        const int row = MaskRow(params_, head - head0_, query);
        const int64_t word = (static_cast<int64_t>(bits) * kDecodeTileRows + row) * 2 + first_ / 32;
        CopyWord(own, p_.mask.bits + word);
      }
    }
  }

  // ---- memory ----
  // Brings what the warp loads first into L2 while the previous kernel, which writes other rows, still runs.
  __device__ void PrefetchTiles() const {
    constexpr int kSteps = (S::kStages + 1) / 2;
    const int step = lane_ / S::kWarpKeys;  // two at a time
    for (int i = step; i < kSteps; i += 32 / S::kWarpKeys) {
      const int at = next_ + i * S::kTilesAtOnce, place = first_ + lane_ % S::kWarpKeys;
      if (at >= end_) continue;
      int key = at * kTileKeys + place;
      if constexpr (kColumns) {
        if (at >= columns_.entries.tiles) {
          key = columns_.RangeTile(at) * kTileKeys + place;
        } else {
          uint32_t keys;
          const int tile = columns_.ReadEntry(params_.columns.gathers != 0, at, place / 32 * 32, &keys);
          if ((keys >> place % 32 & 1u) == 0) continue;
          key = columns_.KeyAt(tile, place);
        }
      }
      if (key >= keys_) continue;
      PrefetchRow(key_ + key * p_.key_stride.s, p_.D * static_cast<int>(sizeof(T)));
      PrefetchRow(value_ + key * p_.value_stride.s, p_.Dv * static_cast<int>(sizeof(T)));
    }
  }
  __device__ void CopyQueries() {
    for (int at = warp_; at < kBlocks * S::kChunks; at += S::kWarps) {
      const int n = at / S::kChunks, c = at % S::kChunks;
      const int row = 8 * n + lane_ / 4, d = S::kPerLoad * (4 * c + lane_ % 4);
      const bool valid = row < rows_ && d < p_.D;
      int head = 0, query = 0;
      HeadAndQuery(row, &head, &query);
      const T* from = static_cast<const T*>(p_.query) + b_ * p_.query_stride.b + head * p_.query_stride.h +
                      query * p_.query_stride.s;
      CopyChunk(queries_ + static_cast<uint32_t>(16 * (32 * at + lane_)), valid ? from + d : from, valid);
    }
  }

  // Loads the next stage: the keys of the next KV tile, or its values.
  template <bool kKeys>
  __device__ __forceinline__ void LoadStage() {
    if (kKeys) AdvanceTile();
    __syncwarp();  // all lanes have read the old stage
    if (tile_ >= 0) {
      const uint32_t to = ring_ + static_cast<uint32_t>(stage_ * S::kStageBytes);
      if (kColumns && tile_ >= kGathered) {
        CopyColumns<kKeys>(to, (tile_ - kGathered) * kTileKeys + first_);
      } else {
        Copy<kKeys>(to, tile_ * kTileKeys + first_);
      }
    }
    CommitCopies();
    stage_ = stage_ + 1 == S::kStages ? 0 : stage_ + 1;
  }
  // Copies 16 rows in memory order, so that loads coalesce; each 16 bytes go to the place of the lane that multiplies
  // them.
  template <bool kKeys>
  __device__ __forceinline__ void Copy(uint32_t to, int key0) const {
    constexpr uint32_t kInRow = kHead / S::kPerLoad, kAcross = kInRow < 32 ? kInRow : 32, kDown = 32 / kAcross;
    const uint32_t across = static_cast<uint32_t>(lane_) % kAcross, down = static_cast<uint32_t>(lane_) / kAcross;
    const int64_t stride = kKeys ? p_.key_stride.s : p_.value_stride.s;
    const T* from = (kKeys ? key_ : value_) + (key0 + static_cast<int64_t>(down)) * stride + S::kPerLoad * across;
    const int size = kKeys ? p_.D : p_.Dv, left = keys_ - key0 - static_cast<int>(down);
#pragma unroll
    for (uint32_t row = 0; row < 16; row += kDown) {
#pragma unroll
      for (uint32_t chunk = 0; chunk < kInRow; chunk += kAcross) {
        const bool there = static_cast<int>(S::kPerLoad * (chunk + across)) < size && static_cast<int>(row) < left;
        const uint32_t place = kKeys ? KeyPlace(row | down, chunk | across) : ValuePlace(row | down, chunk | across);
        CopyChunk(to + 16 * place, from + S::kPerLoad * chunk, there);
      }
      from += kDown * stride;
    }
  }
  // The same of 16 gathered columns from list entry `first` on.
  template <bool kKeys>
  __device__ __forceinline__ void CopyColumns(uint32_t to, int first) const {
    constexpr uint32_t kInRow = kHead / S::kPerLoad, kAcross = kInRow < 32 ? kInRow : 32, kDown = 32 / kAcross;
    const uint32_t across = static_cast<uint32_t>(lane_) % kAcross, down = static_cast<uint32_t>(lane_) / kAcross;
    const int64_t stride = kKeys ? p_.key_stride.s : p_.value_stride.s;
    const T* const from = (kKeys ? key_ : value_) + S::kPerLoad * across;
    const int size = kKeys ? p_.D : p_.Dv;
#pragma unroll
    for (uint32_t row = 0; row < 16; row += kDown) {
      const int at = first + static_cast<int>(row | down);
      const bool is_column = at < columns_.entries.columns;
      const T* const own = from + (is_column ? __ldg(columns_.list + at) : 0) * stride;
#pragma unroll
      for (uint32_t chunk = 0; chunk < kInRow; chunk += kAcross) {
        const bool there = static_cast<int>(S::kPerLoad * (chunk + across)) < size && is_column;
        const uint32_t place = kKeys ? KeyPlace(row | down, chunk | across) : ValuePlace(row | down, chunk | across);
        CopyChunk(to + 16 * place, own + S::kPerLoad * chunk, there);
      }
    }
  }
  // Positions in a stage, in units of 16 bytes: load i of lane l is 32 i + l, permuted so that neither writes of a row
  // nor reads of a load have bank conflicts.
  //
  // Lane l multiplies chunks l % 4, l % 4 + 4, ... of keys l / 4 and l / 4 + 8.
  static __device__ __forceinline__ uint32_t KeyPlace(uint32_t row, uint32_t chunk) {
    const uint32_t load = (row >> 3) * S::kChunks + (chunk >> 2), lane = (row & 7) << 2 | (chunk & 3);
    return load << 5 | (lane ^ (chunk & 4));
  }
  // It multiplies chunks l / 4, l / 4 + 8, ... of the values of keys 2 (l % 4) + i % 2 + 8 (i / 2), in fp32 of keys 4 i
  // + l % 4.
  static __device__ __forceinline__ uint32_t ValuePlace(uint32_t row, uint32_t chunk) {
    const uint32_t i = kFloat ? row >> 2 : (row & 1) | row >> 3 << 1, low = kFloat ? row & 3 : row >> 1 & 3;
    return (i * (S::kChunks / 2) + (chunk >> 3)) << 5 | ValueOrder(chunk & 7, low);
  }
  static __device__ __forceinline__ uint32_t ValueOrder(uint32_t high, uint32_t low) {
    return low << 3 | (high ^ low << 1);
  }
  // The address of the oldest stage.
  __device__ __forceinline__ uint32_t OldestStage() {
    const uint32_t at = ring_ + static_cast<uint32_t>(consumed_ * S::kStageBytes);
    consumed_ = consumed_ + 1 == S::kStages ? 0 : consumed_ + 1;
    return at;
  }

  // ---- a step: cuda/attention/decode/cluster_step.cuh ----
  __device__ __forceinline__ void Scores(float (&s)[kBlocks][4]);
  __device__ __forceinline__ void AddValues(const float (&s)[kBlocks][4]);
  __device__ __forceinline__ void ApplyMaskAndBias(int step, float (&s)[kBlocks][4]);
  __device__ __forceinline__ void Softmax(float (&s)[kBlocks][4]);

  // ---- epilogue: cuda/attention/decode/cluster_combine.cuh ----
  __device__ float* WarpOutputs(int warp) const {
    return reinterpret_cast<float*>(shared_ + S::kRing + warp * S::kStages * S::kStageBytes);
  }
  // Row max and row sum of the rows of a warp.
  __device__ float2* WarpStats(int warp) const {
    return reinterpret_cast<float2*>(shared_ + S::kStats) + warp * S::kRows;
  }
  // What CTA `rank` of the cluster sends to this one: row max and row sum, and a share of the output.
  __device__ float2* ReceivedStats(int rank) const {
    return reinterpret_cast<float2*>(shared_ + S::kReceivedStats) + rank * S::kRows;
  }
  __device__ float4* ReceivedOutputs(int rank, int share) const {
    return reinterpret_cast<float4*>(shared_ + S::kReceived) + rank * share;
  }

  static __device__ __forceinline__ float WeightOf(float maximum, float top) {
    return maximum == -INFINITY ? 0.0f : Exp2(maximum - top);
  }
  static __device__ __forceinline__ void Add(const float4& part, float part_sum, float weight, float4* x, float* sum) {
    x->x += part.x * weight, x->y += part.y * weight, x->z += part.z * weight, x->w += part.w * weight;
    *sum += part_sum * weight;
  }

  __device__ void CombineWarps();
  __device__ void StoreOutput(int row, int d, const float4& x, const float2& all);

  const DecodeParams& params_;
  const AttentionParams& p_;
  char* shared_;
  ColumnList columns_;
  int b_, head0_, block_, rows_, split_, warp_, lane_, first_;  // first_: the first key of the warp in a tile
  int next_ = 0, end_ = 0, full_ = 0, tile_ = -1;
  int keys_;                                   // that may be read
  int loaded_ = 0, stage_ = 0, consumed_ = 0;  // steps loaded; positions in the ring
  KeyRange range_;
  int32_t invalid_ = 0;  // ReadInvalid
  bool masked_, padded_;
  float scale_;
  const T *key_, *value_;
  uint32_t ring_, queries_, steps_, live_tiles_ = 0;
  Tile current_tiles_, next_tiles_;
  float o_[kBlocks][S::kOutputs][4];
  float max_[kBlocks][2], sum_[kBlocks][2];
};

}  // namespace cuda
}  // namespace stof
#include "cuda/attention/decode/cluster_combine.cuh"
#include "cuda/attention/decode/cluster_step.cuh"
namespace stof {
namespace cuda {

template <int kHead, typename T, int kBlocks, bool kColumns>
__global__ void __launch_bounds__(ClusterShape<kHead, T, kBlocks>::kThreads, ClusterShape<kHead, T, kBlocks>::kCtas)
    DecodeCluster(const __grid_constant__ DecodeParams params) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900  // code for earlier devices would never run
  extern __shared__ __align__(16) char decode_shared[];
  ClusterDecode<kHead, T, kBlocks, kColumns>(params, decode_shared).Run();
#endif
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_CLUSTER_CUH_
