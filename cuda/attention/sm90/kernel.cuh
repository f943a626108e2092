// SPDX-License-Identifier: Apache-2.0
// Block-sparse attention for compute capability 9.0a, warp-specialized and persistent. A producer warp goes through the
// KV tiles that the block mask keeps and loads them by TMA. Consumer warpgroups of 64 query rows compute with wgmma.
// Within a warpgroup, the scores of the next tile and the product with the values of this one are in flight while the
// softmax runs. Among warpgroups, ping-pong scheduling overlaps the softmax of one with the wgmma of another (Shah et
// al. 2024, FlashAttention-3, sec. 3.1 and 3.2). Partial tiles apply their element mask, full ones none.
// For few or very uneven tile rows, the pipelines of a CTA split the KV tiles of one tile row and combine their
// outputs.
// Over 500 lines: one class, whose members share registers; its concepts are in the other headers of this folder.
#ifndef STOF_CUDA_ATTENTION_SM90_KERNEL_CUH_
#define STOF_CUDA_ATTENTION_SM90_KERNEL_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/lse.cuh"
#include "cuda/attention/sm90/api.h"
#include "cuda/attention/sm90/combine.cuh"
#include "cuda/attention/sm90/config.cuh"
#include "cuda/attention/sm90/int8/mma.cuh"
#include "cuda/attention/sm90/skip_test.cuh"
#include "cuda/attention/sm90/softmax.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm90.cuh"
#include "cuda/mask/fragments.h"

namespace stof {
namespace cuda {
namespace sm90 {

// compute-sanitizer's racecheck does not see that __syncwarp orders the accesses of other lanes before lane 0's
// arrival. It is run on a slower build, in which all lanes arrive.
#if defined(STOF_EVERY_LANE_ARRIVES)
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif

// The value of lane 0, which tells the compiler that it is uniform in a warp: wgmma in a path that may diverge would be
// serialized.
__device__ __forceinline__ int32_t Uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

// A position in a ring of buffers, and the parity of its phase.
template <int kCount>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next() {
    if (++at == kCount) at = 0, phase ^= 1;
  }
};

template <typename S, typename T>
class Sm90Attention {
  using RowSoftmax = Softmax<S>;
  static constexpr int kQueryStages = S::kQueryStages, kHead = S::kHead;

 public:
  // shared: of all pipelines.
  __device__ Sm90Attention(const Sm90Params& p, unsigned char* shared) : p_(p) {
    const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    const int warp = Uniform(static_cast<int>(threadIdx.x) % kWarpgroup / 32);
    producer_ = warpgroup == 0;
    pipeline_ = producer_ ? warp : (warpgroup - 1) / S::kConsumers;
    wg_ = producer_ ? 0 : (warpgroup - 1) % S::kConsumers;
    lane_ = static_cast<int>(threadIdx.x) % 32;
    row_ = 64 * wg_ + 16 * warp + lane_ / 4;
    shared_ = shared + pipeline_ * S::kPipelineBytes;
    // Opaque keeps the compiler from recomputing the address wherever it is needed.
    base_ = Opaque(SharedAddress(shared_));
    inner_ = Opaque(DescribeInner(base_));
    across_ = Opaque(DescribeAcross(base_, S::kN * 128));
  }

  __device__ void Run() {
    LetNextStart();
    const bool has_pipeline = pipeline_ < S::kPipelines;  // warps beyond the producers have none
    if (producer_ && has_pipeline && lane_ == 0) {
      PrefetchMap(&p_.query);
      PrefetchMap(&p_.key);
      PrefetchMap(&p_.value);
      if (S::kFullBias && p_.attention.bias != nullptr) PrefetchMap(&p_.bias);
      for (int i = 0; i < S::kStages; ++i) {
        InitBarrier(Barrier(kKeyFull, i), kEveryLaneArrives ? 32 : 1);
        InitBarrier(Barrier(kKeyEmpty, i), kArrivals);
        InitBarrier(Barrier(kValueFull, i), 1);
        InitBarrier(Barrier(kValueEmpty, i), kArrivals);
      }
      for (int i = 0; i < kQueryStages; ++i) {
        InitBarrier(QueryFull(i), 1);
        InitBarrier(QueryEmpty(i), kArrivals);
      }
      if (S::kDynamic) InitBarrier(NextTileFull(), 1);
      FenceBarrierInit();
    }
    // Before the wait for the previous kernel, only parameters and the schedule are read, which was uploaded before
    // that kernel began; everything else is at most prefetched into L2.
    const bool produces = producer_ && has_pipeline;
    FirstWork first_work;
    if (produces) first_work = ReadFirstWork();
    __syncthreads();
    if (produces) PrefetchMask(first_work), PrefetchInputs(first_work);
    WaitForPrevious();
    if (producer_) {
      GiveRegisters<S::kProducerRegisters>();
      if (has_pipeline) Produce(first_work);
      if constexpr (S::kDynamic) {
        if (!has_pipeline && pipeline_ < 2 * S::kPipelines) RunScheduler();
      }
    } else {
      TakeRegisters<S::kConsumerRegisters>();
      Consume();
    }
  }

 private:
  static constexpr int kArrivals = (kEveryLaneArrives ? kWarpgroup : 4) * S::kConsumers;
  enum Kind { kKeyFull, kKeyEmpty, kValueFull, kValueEmpty };
  __device__ __forceinline__ uint32_t Barrier(Kind kind, int i) const {
    return base_ + S::kBarriers + 8 * (kind * S::kStages + i);
  }
  __device__ __forceinline__ uint32_t QueryFull(int i) const { return base_ + S::kBarriers + 8 * (4 * S::kStages + i); }
  __device__ __forceinline__ uint32_t QueryEmpty(int i) const { return QueryFull(kQueryStages + i); }
  __device__ __forceinline__ uint32_t NextTileFull() const { return QueryFull(2 * kQueryStages); }
  __device__ __forceinline__ WorkTile* NextTile() { return reinterpret_cast<WorkTile*>(shared_ + S::kNextTile); }
  __device__ __forceinline__ Entry* Entries() { return reinterpret_cast<Entry*>(shared_ + S::kEntries); }
  __device__ __forceinline__ WorkTileInfo* TileInfos() {
    return reinterpret_cast<WorkTileInfo*>(shared_ + S::kTileInfos);
  }

  // ---- the producer warp: cuda/attention/sm90/producer.cuh ----
  struct Cursor {
    Ring<S::kStages> stage;
    Ring<S::kSlots> slot;
    Ring<kQueryStages> query;
    uint32_t next_phase = 0;
    bool queries_due = false;  // they are loaded after the first KV tile
    bool is_first = true;      // no KV tile was loaded yet
    int b = 0, g = 0, h = 0, row0 = 0;
    int subtile = -1;
  };

  // What a CTA begins with.
  struct FirstWork {
    int i = 0, end = 0;           // its work tiles: in the schedule, or tile rows
    WorkTile first = {};          // set where no mask has to be read for it
    int tile = -1, code = kFull;  // the first KV tile of this pipeline, if the schedule has it
    int second = -1;              // the KV tile after it, unless pipelines split
    Cursor cursor;                // at the first work tile
  };
  __device__ __forceinline__ int Rows() const { return (p_.attention.S + S::kM - 1) / S::kM; }

  __device__ __forceinline__ void Locate(const WorkTile& work_tile, Cursor* cursor) const;
  __device__ FirstWork ReadFirstWork() const;
  __device__ void PrefetchMask(const FirstWork& first_work) const;
  __device__ void PrefetchInputs(const FirstWork& first_work) const;
  __device__ void Produce(const FirstWork& first_work);
  __device__ __forceinline__ void LoadQueries(Cursor* cursor);
  __device__ WorkTile WorkTileAt(int i, int rows) const;
  __device__ void RunScheduler();
  __device__ __forceinline__ WorkTile FetchDynamicTile() const;
  __device__ __forceinline__ WorkTile ReceiveNextTile(Cursor* cursor);

  // A KV tile and its mask code; tile -1 behind the last.
  struct KvTile {
    int tile, code;
  };
  __device__ __forceinline__ KvTile ReadKvTile(const WorkTile& work_tile, int i) const;
  // Which of the first 32 KV tiles of a work tile this lane looks at.
  __device__ __forceinline__ int LaneTile() const { return S::kSplit > 1 ? pipeline_ + S::kSplit * lane_ : lane_; }

  __device__ __forceinline__ KvTile ProduceKvTiles(const WorkTile& work_tile, WorkTile* next_tile, KvTile lane_tile,
                                                   Cursor* cursor, bool in_flight);

  // A KV tile after padding is applied; tile -1: padding leaves nothing.
  struct PaddedTile {
    int tile, code, flags;
  };
  __device__ __forceinline__ PaddedTile ApplyPadding(int b, const KvTile& lane_tile) const;
  __device__ __forceinline__ uint32_t PaddingWord(int b, int tile, int w) const;
  __device__ __forceinline__ void LoadFirstKvTile(int tile, const Cursor& cursor) const;
  __device__ __forceinline__ void PublishKvTile(const PaddedTile& padded, int next, Cursor* cursor, bool in_flight);
  __device__ __forceinline__ int LoadBiases(int tile, const Cursor& cursor, int* flags);

  template <Kind kFull>
  __device__ __forceinline__ void ExpectAndCopy(int stage, int tile, const Cursor& cursor, bool in_flight,
                                                int more = 0);
  __device__ __forceinline__ void CopyKeys(int stage, int tile, const Cursor& cursor) const;
  __device__ __forceinline__ void CopyValues(int stage, int tile, const Cursor& cursor) const;

  // ---- a consumer warpgroup: 64 query rows ----
  static constexpr int kScores = S::kN / 2;  // elements of a thread, of 64 × N
  static constexpr int kOutputs = kHead / 2;
  static constexpr int kChains = 4;
  // Named barriers of one warpgroup, behind those of ping-pong scheduling.
  static constexpr int kWarpgroupBarrier = 1 + S::kPipelines * S::kConsumers;
  // Named barriers of a producer and its scheduler warp: the next work tile was received.
  static constexpr int kNextTakenBarrier = kWarpgroupBarrier + S::kPipelines * S::kConsumers;
  static_assert(!S::kDynamic || kNextTakenBarrier + S::kPipelines <= 16, "named barriers");

  __device__ void Consume() {
    const AttentionParams& p = p_.attention;
    scale_ = S::kScoreMod ? kLog2E : p.scale * kLog2E;
    sink_or_lse_ = p.sink != nullptr || p.lse != nullptr;
    skips_ = p.pad_bits == nullptr ? 1 : 0;
    if (wg_ == S::kConsumers - 1) PingPongSignal();
    Ring<kQueryStages> query;
    Ring<S::kStages> keys, values;
    Ring<S::kSlots> slots;
    for (;;) {
      Wait(QueryFull(query.at), query.phase);
      const WorkTileInfo info = ReadTileInfo(query.at);
      if (info.row0 < 0) break;
      if (S::kHalfTiles && info.subtile >= 0 && info.subtile != wg_) {
        SkipWorkTile(query.at, &keys, &values, &slots);
      } else {
        ComputeWorkTile(info, query.at, &keys, &values, &slots);
      }
      query.Next();
    }
    if (wg_ == 0) PingPongWait();                 // takes the last turn, so that no named barrier stays half full
    if (S::kSeparateOutput) WaitStoresRead<0>();  // the CTA must not end before TMA has read its shared memory
  }

  __device__ __forceinline__ WorkTileInfo ReadTileInfo(int at) {
    const WorkTileInfo info = TileInfos()[at];
    return {Uniform(info.b), Uniform(info.h), Uniform(info.row0),
            S::kSplitsRows || S::kHalfTiles ? Uniform(info.subtile) : -1};
  }
  __device__ __forceinline__ void PingPongWait() const {
    if constexpr (S::kConsumers > 1) SyncNamed(1 + pipeline_ * S::kConsumers + wg_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void PingPongSignal() const {
    if constexpr (S::kConsumers > 1) {
      ArriveNamed(1 + pipeline_ * S::kConsumers + (wg_ + 1) % S::kConsumers, 2 * kWarpgroup);
    }
  }
  // Releases a buffer for the warp, after the reads of all its lanes.
  __device__ __forceinline__ void Release(uint32_t barrier) const {
    __syncwarp();
    if (kEveryLaneArrives || lane_ == 0) Arrive(barrier);
  }

  // Where the output replaces the queries they are released after its store.
  __device__ __forceinline__ void ReleaseQueries(int query) const {
    if (S::kSplit > 1 || S::kSeparateOutput) Release(QueryEmpty(query));
  }

  __device__ __forceinline__ void ComputeWorkTile(const WorkTileInfo& info, int query, Ring<S::kStages>* keys,
                                                  Ring<S::kStages>* values, Ring<S::kSlots>* slots) {
    if constexpr (S::kInt8) {
      ComputeInt8WorkTile(info, query, keys, values, slots);
    } else {
      Compute16BitWorkTile(info, query, keys, values, slots);
    }
  }

  // Longer than 80 lines: the order of waits, wgmmas and softmax is the schedule, and is read as a whole.
  __device__ __forceinline__ void Compute16BitWorkTile(const WorkTileInfo& info, int query, Ring<S::kStages>* keys,
                                                       Ring<S::kStages>* values, Ring<S::kSlots>* slots) {
    float o[kOutputs], s[kScores], row_max[2], sum[2];
    uint32_t weights[kScores / 2], bits[S::kMaskWords];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) row_max[r] = -INFINITY, sum[r] = 0.0f;

    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    int code = Uniform(Entries()[slots->at].code);
    int flags = Uniform(Entries()[slots->at].flags);
    int next = Uniform(Entries()[slots->at].next);
    if constexpr (S::kSkipsTiles) {
      while (MaySkip(LeadingSkips(code))) {
        SkipTile(keys, values, slots);
        Wait(Barrier(kKeyFull, keys->at), keys->phase);
        code = Uniform(Entries()[slots->at].code);
        flags = Uniform(Entries()[slots->at].flags);
        next = Uniform(Entries()[slots->at].next);
      }
    }
    if (code == kEmpty) {
      Release(Barrier(kKeyEmpty, keys->at));
      Wait(Barrier(kValueFull, values->at), values->phase);
      Release(Barrier(kValueEmpty, values->at));
      ReleaseQueries(query);
      keys->Next();
      values->Next();
      slots->Next();
      StoreOutput(info, query, o, FinalizeRows(info, row_max, sum));
      return;
    }
    if (S::kPingPongEnds) PingPongWait();
    PinRegisters(s);
    WgmmaFence();
    Scores(query, keys->at, s);
    WgmmaCommit();
    if (S::kPingPongEnds) PingPongSignal();
    FetchBits(code, bits);
    WgmmaWait<0>();
    PinRegisters(s);
    if constexpr (S::kScoreMod) ApplyScoreMod(keys->at, flags, s);
    Release(Barrier(kKeyEmpty, keys->at));
    bool last = (flags & kLast) != 0 || (S::kSkipsTiles && MaySkip(TrailingSkips(next)));
    if (last) ReleaseQueries(query);
    keys->Next();
    float factor[2];
    typename RowSoftmax::EagerWeights eager;
    if (code != kFull) ApplyMask(code, flags, slots->at, bits, s);
    FetchBits(next, bits);
    const float none[2] = {0.0f, 0.0f};
    RowSoftmax::template RaiseMax<true>(scale_, none, s, &eager, row_max, factor, sum);
    // Skip by score. The first tile is kept, so that every row with a key in it has a largest score.
    const bool is_row[2] = {info.row0 + row_ < p_.attention.S, info.row0 + row_ + 8 < p_.attention.S};
    SkipTest<S> test(p_.skip_distance, row_max, is_row);
    SkipRecord record;
    bool kept = true;  // the last tile; its weights are packed
    RowSoftmax::FinishWeights(&eager, s, sum);
    Pack(s, weights);
    while (!last) {
      if constexpr (S::kSkipsByScore) {
        record.Next();
        if (record.IsTested()) {
          const Registers registers = {o, s, weights, bits, row_max, sum};
          kept = ComputeTestedTile(info, query, kept, registers, keys, values, slots, &test, &record, &next, &last);
          continue;
        }
      }
      slots->Next();
      Wait(Barrier(kKeyFull, keys->at), keys->phase);
      PingPongWait();
      PinRegisters(s);
      PinRegisters(o);
      PinRegisters(weights);
      WgmmaFence();
      Scores(query, keys->at, s);
      WgmmaCommit();
      Wait(Barrier(kValueFull, values->at), values->phase);
      WgmmaFence();
      AddValues(values->at, weights, o);
      WgmmaCommit();
      PingPongSignal();
      code = next;
      int flags_and_next[2];  // flags and next of the entry, loaded now and used after the softmax
      LoadShared(flags_and_next, SharedAddress(&Entries()[slots->at].flags));
      WgmmaWait<1>();
      PinRegisters(s);
      if constexpr (S::kScoreMod) ApplyScoreMod(keys->at, Uniform(flags_and_next[0]), s);
      Release(Barrier(kKeyEmpty, keys->at));
      keys->Next();
      if (code != kFull) ApplyMask(code, Uniform(flags_and_next[0]), slots->at, bits, s);
      const float base[2] = {RowSoftmax::SubtractedMax(row_max[0]), RowSoftmax::SubtractedMax(row_max[1])};
      RowSoftmax::SubtractMax(scale_, base, s, &eager);
      if (__builtin_expect(RowSoftmax::MustRaiseMax(row_max, s, eager), 0)) {
        RowSoftmax::template RaiseMax<false>(1.0f, base, s, &eager, row_max, factor, sum);
        // Rows behind the last query are fully masked: with a row max of -inf they would come here with every tile.
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (info.row0 + row_ + 8 * r >= p_.attention.S) row_max[r] = 0.0f;
        }
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) != 0) RescaleOutput(factor, o);
      }
      // The branch above keeps what follows behind it. In one block, ptxas (13.0) would move this wait to the start of
      // the block, and nothing would overlap the wgmma. Here it has nearly ended, and the registers of its weights are
      // free for the next ones.
      WgmmaWait<0>();
      PinRegisters(o);
      PinRegisters(weights);
      RowSoftmax::FinishWeights(&eager, s, sum);
      Pack(s, weights);
      Release(Barrier(kValueEmpty, values->at));
      values->Next();
      next = Uniform(flags_and_next[1]);
      last = (Uniform(flags_and_next[0]) & kLast) != 0 || (S::kSkipsTiles && MaySkip(TrailingSkips(next)));
      if (last) ReleaseQueries(query);
      FetchBits(next, bits);
    }
    slots->Next();
    Wait(Barrier(kValueFull, values->at), values->phase);
    if (S::kPingPongEnds) PingPongWait();
    PinRegisters(o);
    PinRegisters(weights);
    if (!S::kSkipsByScore || kept) {
      WgmmaFence();
      AddValues(values->at, weights, o);
      WgmmaCommit();
    }
    if (S::kPingPongEnds) PingPongSignal();
    if constexpr (S::kSkipsByScore) CountTiles(info, record);
    const RowScales row_scales = FinalizeRows(info, row_max, sum);
    WgmmaWait<0>();
    PinRegisters(o);
    Release(Barrier(kValueEmpty, values->at));
    values->Next();
    StoreOutput(info, query, o, row_scales);
    if constexpr (S::kSkipsTiles) {
      while (MaySkip(TrailingSkips(next))) {
        Wait(Barrier(kKeyFull, keys->at), keys->phase);
        next = Uniform(Entries()[slots->at].next);
        SkipTile(keys, values, slots);
      }
    }
  }

  // ---- 8-bit operands: cuda/attention/sm90/int8/tiles.cuh ----
  static constexpr int kWeightWords = S::kFp8 ? kScores / 4 : kScores / 2;
  // Scales of a KV tile: from a thread's accumulators to scores in units of log2, for two rows, the first 8 keys and
  // the others; and of its values.
  struct TileScales {
    float first[2], others[2], value;
  };
  __device__ __forceinline__ void ComputeInt8WorkTile(const WorkTileInfo& info, int query, Ring<S::kStages>* keys,
                                                      Ring<S::kStages>* values, Ring<S::kSlots>* slots);
  __device__ __forceinline__ TileScales ReadTileScales(int stage, const float (&query_scale)[2]) const;
  __device__ __forceinline__ void Int8Scores(int query, int stage, float (&s)[kScores]) const;
  static __device__ __forceinline__ void Dequantize(const TileScales& scales, const float (&base)[2],
                                                    float (&s)[kScores]);
  static __device__ __forceinline__ void PackInt8Weights(const float (&s)[kScores], uint32_t (&weights)[kWeightWords]);
  __device__ __forceinline__ void AddFp8Values(int stage, int part, const uint32_t (&weights)[kWeightWords],
                                               float (&products)[S::kPartOutputs]) const;
  static __device__ __forceinline__ void Promote(int part, const float (&scale)[2],
                                                 const float (&products)[S::kPartOutputs], float (&o)[kOutputs]);

  // ---- skip by score: cuda/attention/sm90/skip_tiles.cuh ----
  // Of a thread, from tile to tile.
  struct Registers {
    float (&o)[kOutputs], (&s)[kScores];
    uint32_t (&weights)[kScores / 2], (&bits)[S::kMaskWords];
    float (&row_max)[2], (&sum)[2];
  };
  __device__ __forceinline__ bool ComputeTestedTile(const WorkTileInfo& info, int query, bool has_weights,
                                                    const Registers& registers, Ring<S::kStages>* keys,
                                                    Ring<S::kStages>* values, Ring<S::kSlots>* slots, SkipTest<S>* test,
                                                    SkipRecord* record, int* next, bool* last);
  __device__ __forceinline__ bool TestTile(int code, const float (&row_max)[2], const float (&s)[kScores],
                                           SkipTest<S>* test, SkipRecord* record) const;
  __device__ __forceinline__ void CountTiles(const WorkTileInfo& info, const SkipRecord& record) const;
  // The outer vote tells the compiler that the answer is the same in a warp.
  __device__ __forceinline__ bool AnyOfWarpgroup(bool x) const {
    return __any_sync(~0u, AnyNamed(OwnBarrier(), kWarpgroup, x)) != 0;
  }

  // Whether this warpgroup is in the set of those that skip a tile. With padding none skips: it might leave a warpgroup
  // no tile.
  __device__ __forceinline__ bool MaySkip(int32_t groups) const { return (groups >> wg_ & skips_) != 0; }
  // Skips a KV tile: releases its buffers and passes its turn of ping-pong scheduling on.
  __device__ __forceinline__ void SkipTile(Ring<S::kStages>* keys, Ring<S::kStages>* values,
                                           Ring<S::kSlots>* slots) const {
    Release(Barrier(kKeyEmpty, keys->at));
    PingPongWait();
    PingPongSignal();
    Wait(Barrier(kValueFull, values->at), values->phase);
    Release(Barrier(kValueEmpty, values->at));
    keys->Next();
    values->Next();
    slots->Next();
  }

  // Skips all KV tiles of a half tile of the other warpgroup, with as many turns as that takes.
  __device__ __forceinline__ void SkipWorkTile(int query, Ring<S::kStages>* keys, Ring<S::kStages>* values,
                                               Ring<S::kSlots>* slots) {
    ReleaseQueries(query);
    bool first = true, last = false;
    while (!last) {
      Wait(Barrier(kKeyFull, keys->at), keys->phase);
      const bool nothing = Uniform(Entries()[slots->at].code) == kEmpty;
      last = (Uniform(Entries()[slots->at].flags) & kLast) != 0;
      Release(Barrier(kKeyEmpty, keys->at));
      if (!nothing && (S::kPingPongEnds || !first)) {
        PingPongWait();
        PingPongSignal();
      }
      Wait(Barrier(kValueFull, values->at), values->phase);
      if (S::kPingPongEnds && last && !nothing) {
        PingPongWait();
        PingPongSignal();
      }
      Release(Barrier(kValueEmpty, values->at));
      keys->Next();
      values->Next();
      slots->Next();
      first = false;
    }
    if (!S::kSeparateOutput) Release(QueryEmpty(query));
  }

  static __device__ __forceinline__ void RescaleOutput(const float (&factor)[2], float (&o)[kOutputs]) {
    WgmmaWait<0>();
    PinRegisters(o);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // s = queries · keysᵀ
  __device__ __forceinline__ void Scores(int query, int stage, float (&s)[kScores]) const {
    const uint32_t a = inner_ + query * (S::kQueryBytes / 16) + wg_ * (kHead / kAtom * 64 * 128 / 16);
    const uint32_t b = inner_ + S::kKeys / 16 + stage * (S::kKeyBytes / 16);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k) {
      const int column = k % 4 * 32;  // bytes within a swizzled row
      Wgmma<T>::Inner(s, Operand(a + (k / 4 * 64 * 128 + column) / 16),
                      Operand(b + (k / 4 * S::kN * 128 + column) / 16), k > 0);
    }
  }

  // o += weights · values
  __device__ __forceinline__ void AddValues(int stage, const uint32_t (&weights)[kScores / 2],
                                            float (&o)[kOutputs]) const {
    const uint32_t b = across_ + S::kValues / 16 + stage * (S::kValueBytes / 16);
#pragma unroll
    for (int k = 0; k < S::kN / 16; ++k) {
      Wgmma<T>::Across(o, weights + 4 * k, Operand(b + k * 16 * 128 / 16));
    }
  }

  // ---- scale, softcap and biases: cuda/attention/sm90/score_bias.cuh ----
  __device__ __forceinline__ void ApplyScoreMod(int stage, int flags, float (&s)[kScores]);
  template <typename B>
  __device__ __forceinline__ uint32_t BiasAddress(int stage, uint32_t* next) const;
  template <typename B>
  static __device__ __forceinline__ float2 ReadBias(uint32_t own, int j, uint32_t row);
  template <typename B>
  __device__ __forceinline__ void AddFullBias(int stage, float factor, float (&s)[kScores]) const;

  // Loads this thread's part of an element mask early: it arrives while wgmma is in flight.
  __device__ __forceinline__ void FetchBits(int code, uint32_t (&bits)[S::kMaskWords]) const {
    if (code < 0) return;
    const uint32_t* from = p_.attention.mask.bits +
                           (static_cast<int64_t>(S::kConsumers > 1 ? code & kIdMask : code) * S::kConsumers + wg_) *
                               S::kMaskWords * kWarpgroup +
                           threadIdx.x % kWarpgroup;
#pragma unroll
    for (int w = 0; w < S::kMaskWords; ++w) bits[w] = LoadWord(from + w * kWarpgroup);
  }

  // Sets forbidden scores of a partial or padded tile to -inf.
  __device__ __forceinline__ void ApplyMask(int code, int flags, int slot, const uint32_t (&bits)[S::kMaskWords],
                                            float (&s)[kScores]) {
    uint32_t words[S::kMaskWords];
#pragma unroll
    for (int w = 0; w < S::kMaskWords; ++w) words[w] = code >= 0 ? bits[w] : ~0u;
    if ((flags & kHasPadding) != 0) {
      const uint32_t* pad = Entries()[slot].pad;
#pragma unroll
      for (int w = 0; w < S::kMaskWords; ++w) {
        const uint32_t low = pad[2 * w], high = 2 * w + 1 < S::kPaddingWords ? pad[2 * w + 1] : 0;
        words[w] &= FragmentWord(low, high, low, high, lane_ % 4);
      }
    }
    // Byte by byte, so that the compiler moves seven bits at once to predicates.
#pragma unroll
    for (int w = 0; w < S::kMaskWords; ++w) {
#pragma unroll
      for (int bit = 0; bit < 32; ++bit) {
        const int i = 4 * (8 * w + FragmentBlock(bit)) + FragmentElement(bit);
        if (i < kScores && (words[w] & 1u << bit) == 0) s[i] = -INFINITY;
      }
    }
  }

  static __device__ __forceinline__ void Pack(const float (&s)[kScores], uint32_t (&weights)[kScores / 2]) {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i) weights[i] = cuda::Pack<T>(s[2 * i], s[2 * i + 1]);
  }

  // ---- outputs: cuda/attention/sm90/epilogue.cuh ----
  // What normalizes the outputs of a thread's two rows, and whether these are fully masked.
  struct RowScales {
    float scale[2];
    bool empty[2];
  };
  __device__ __forceinline__ RowScales FinalizeRows(const WorkTileInfo& info, const float (&row_max)[2],
                                                    const float (&sum)[2]) const;
  __device__ __forceinline__ RowScales FinalizeInPipeline(const WorkTileInfo& info, const float (&row_max)[2],
                                                          float (&total)[2]) const;
  __device__ __forceinline__ RowScales FinalizeAcrossPipelines(const WorkTileInfo& info, const float (&row_max)[2],
                                                               const float (&own)[2]) const;
  __device__ __forceinline__ void StoreOutput(const WorkTileInfo& info, int query, float (&o)[kOutputs],
                                              RowScales row_scales) const;
  __device__ __forceinline__ void CombineAndStore(const WorkTileInfo& info, float (&o)[kOutputs],
                                                  const RowScales& row_scales) const;
  __device__ __forceinline__ void StoreSplit(int part, const float (&o)[kOutputs]) const;
  // Named barriers of all consumers, where pipelines split a work tile.
  static constexpr int kAllConsumers = S::kSplit * S::kConsumers * kWarpgroup, kFirstBarrier = 14, kSecondBarrier = 15;
  __device__ __forceinline__ unsigned char* CombineMemory() const {
    return shared_ - pipeline_ * S::kPipelineBytes + S::kCombineMemory;
  }
  __device__ __forceinline__ int OwnBarrier() const { return kWarpgroupBarrier + pipeline_ * S::kConsumers + wg_; }
  __device__ __forceinline__ void SyncWarpgroup() const { SyncNamed(OwnBarrier(), kWarpgroup); }

  const Sm90Params& p_;
  unsigned char* shared_;
  uint32_t base_, inner_, across_;
  bool producer_;
  int pipeline_, wg_, lane_, row_;
  float scale_ = 1.0f;
  bool sink_or_lse_ = false;  // the row sum is needed: there is a sink, or the LSE is wanted
  int32_t skips_ = 0;         // 1: tiles may be skipped
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#include "cuda/attention/sm90/epilogue.cuh"
#include "cuda/attention/sm90/int8/tiles.cuh"
#include "cuda/attention/sm90/producer.cuh"
#include "cuda/attention/sm90/score_bias.cuh"
#include "cuda/attention/sm90/skip_tiles.cuh"
namespace stof {
namespace cuda {
namespace sm90 {

template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads, 1) AttentionKernel(const __grid_constant__ Sm90Params params) {
  extern __shared__ unsigned char shared[];
  const uint32_t lost = -SharedAddress(shared) & 1023u;
  Sm90Attention<S, T>(params, shared + lost).Run();
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_KERNEL_CUH_
