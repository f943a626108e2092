// SPDX-License-Identifier: Apache-2.0
// Block-wise attention for compute capability 9.0a. Persistent CTAs of one producer warpgroup, which walks the tiles
// that the block mask keeps and has the copy engine bring them, and consumer warpgroups of 64 query rows each, which
// compute with wgmma. Within a warpgroup the scores of the next tile and the product with the values of this one are in
// flight while the softmax runs; among warpgroups a turn passes round, so that one's softmax covers another's products
// (Shah et al. 2024, FlashAttention-3, sec. 3.1 and 3.2). Partial tiles take their bits from the mask, full ones none.
// Where there are few rows, or some are much longer than others, the teams of a CTA take every so manieth tile of one
// row and put their parts together at its end.
#ifndef STOF_CUDA_ATTENTION_SM90_CUH_
#define STOF_CUDA_ATTENTION_SM90_CUH_

#include <cuda_runtime.h>

#include "cuda/attention_sm90.h"
#include "cuda/attention_sm90_join.cuh"
#include "cuda/attention_sm90_shape.cuh"
#include "cuda/attention_sm90_softmax.cuh"
#include "cuda/fragments.h"
#include "cuda/launch.cuh"
#include "cuda/log_sum.cuh"
#include "cuda/mma_sm90.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// compute-sanitizer's racecheck does not see that __syncwarp orders other lanes' reads before lane 0's arrival; it is
// run on a build in which all arrive, which is slower.
#if defined(STOF_EVERY_LANE_ARRIVES)
constexpr bool kEveryLaneArrives = true;
#else
constexpr bool kEveryLaneArrives = false;
#endif

// The value of lane 0: for what is equal in a warp, so that the compiler knows. wgmma in a path that may diverge would
// be serialized.
__device__ __forceinline__ int32_t Uniform(int32_t x) { return __shfl_sync(~0u, x, 0); }

// A position in a ring of buffers, with the parity of its phase.
template <int kCount>
struct Ring {
  int at = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void Next() {
    if (++at == kCount) at = 0, phase ^= 1;
  }
};

template <typename S, typename T>
class Attention {
  using Weights = Softmax<S>;
  static constexpr int kQueries = S::kQueries, kHead = S::kHead;

 public:
  // shared: that of all teams.
  __device__ Attention(const Sm90Params& p, unsigned char* shared) : p_(p) {
    const int warpgroup = Uniform(static_cast<int>(threadIdx.x) / kWarpgroup);
    const int warp = Uniform(static_cast<int>(threadIdx.x) % kWarpgroup / 32);
    producer_ = warpgroup == 0;
    team_ = producer_ ? warp : (warpgroup - 1) / S::kConsumers;
    wg_ = producer_ ? 0 : (warpgroup - 1) % S::kConsumers;
    lane_ = static_cast<int>(threadIdx.x) % 32;
    row_ = 64 * wg_ + 16 * warp + lane_ / 4;
    shared_ = shared + team_ * S::kTeamBytes;
    // By way of an instruction that the compiler cannot repeat wherever it needs the address.
    base_ = Opaque(SharedAddress(shared_));
    inner_ = Opaque(DescribeInner(base_));
    across_ = Opaque(DescribeAcross(base_, S::kN * 128));
  }

  __device__ void Run() {
    LetNextStart();
    const bool has_team = team_ < S::kTeams;  // not the other warps beside the producers
    if (producer_ && has_team && lane_ == 0) {
      PrefetchMap(&p_.query);
      PrefetchMap(&p_.key);
      PrefetchMap(&p_.value);
      if (S::kPairs && p_.attention.bias != nullptr) PrefetchMap(&p_.bias);
      for (int i = 0; i < S::kStages; ++i) {
        InitBarrier(Barrier(kKeyFull, i), 1);
        InitBarrier(Barrier(kKeyEmpty, i), kArrivals);
        InitBarrier(Barrier(kValueFull, i), 1);
        InitBarrier(Barrier(kValueEmpty, i), kArrivals);
      }
      for (int i = 0; i < kQueries; ++i) {
        InitBarrier(QueryFull(i), 1);
        InitBarrier(QueryEmpty(i), kArrivals);
      }
      FenceBarrierInit();
    }
    // Until the wait nothing is read or written but parameters and what belongs to a plan: a plan is of a constant
    // mask, which was copied before the kernel in front of this one began.
    const bool produces = producer_ && has_team;
    Begin begin;
    if (produces) begin = ReadBegin();
    __syncthreads();
    if (produces) FetchPlanned(begin);
    WaitForPrevious();
    if (producer_) {
      GiveRegisters<S::kProducer>();
      if (has_team) Produce(begin);
    } else {
      TakeRegisters<S::kConsumer>();
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
  __device__ __forceinline__ uint32_t QueryEmpty(int i) const { return QueryFull(kQueries + i); }
  __device__ __forceinline__ Entry* Entries() { return reinterpret_cast<Entry*>(shared_ + S::kEntries); }
  __device__ __forceinline__ Item* Items() { return reinterpret_cast<Item*>(shared_ + S::kItems); }

  // ---- the producer: one warp ----
  struct Cursor {
    Ring<S::kStages> stage;
    Ring<S::kSlots> slot;
    Ring<kQueries> query;
    bool queries_due = false;  // they come after the item's first tile
    int b = 0, g = 0, h = 0, row0 = 0;
    int part = -1;
  };

  // What a worker begins with.
  struct Begin {
    int i = 0, end = 0;            // its items, as its plan or it counts them
    WorkItem first = {};           // of a plan
    int tile = -1, code = kEvery;  // of this team's first tile of all, where a plan tells
  };
  __device__ __forceinline__ int Rows() const { return (p_.attention.S + S::kM - 1) / S::kM; }

  __device__ Begin ReadBegin() const {
    const AttentionParams& p = p_.attention;
    const int worker = S::kSplit > 1 ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * S::kTeams + team_;
    Begin begin;
    if (worker >= p_.workers) return begin;
    begin.i = worker, begin.end = p.B * p.H * Rows();
    if (p_.work == nullptr) return begin;
    const WorkStart& start = p_.work_start[worker];
    begin.i = start.begin, begin.end = start.end;
    begin.first = start.first;
    // Padding may leave nothing of it.
    if (p.pad_bits == nullptr) begin.tile = start.tile[S::kSplit > 1 ? team_ : 0];
    begin.code = start.code[S::kSplit > 1 ? team_ : 0];
    return begin;
  }

  // Has the first item's entries and the bits of its first tile come to the L2 cache.
  __device__ void FetchPlanned(const Begin& begin) const {
    if (p_.work == nullptr || begin.i >= begin.end) return;
    const DeviceMask& mask = p_.attention.mask;
    constexpr int kInLine = 32;  // words
    const int entry = begin.first.begin + kInLine * lane_;
    if (lane_ <= S::kSplit && entry < begin.first.end) {
      PrefetchLine(mask.key_tile + entry);
      PrefetchLine(mask.bits_id + entry);
    }
    constexpr int kLines = S::kConsumers * S::kOwnWords * kWarpgroup / kInLine;
    static_assert(kLines <= 32, "a lane for every line of a tile's bits");
    if (begin.code >= 0 && lane_ < kLines) {
      PrefetchLine(mask.bits + (static_cast<int64_t>(begin.code) * kLines + lane_) * kInLine);
    }
  }

  __device__ void Produce(const Begin& begin) {
    const AttentionParams& p = p_.attention;
    const int rows = Rows();
    Cursor cursor;
    const bool planned = p_.work != nullptr;
    int i = begin.i, tile = begin.tile;
    const int end = begin.end;
    // The next item is asked for while this one is worked on.
    WorkItem following = begin.first;
    if (!planned && i < end) following = ItemAt(i, rows);
    Asked asked = Ask(following, Own());
    while (i < end) {
      const WorkItem work = following;
      i += planned ? 1 : p_.workers;
      following = i < end ? ItemAt(i, rows) : WorkItem{};
      const int bh = work.item / rows, row = work.item % rows;
      const int b = bh / p.H, h = bh % p.H;
      cursor.b = b;
      cursor.g = h / (p.H / p.G);
      cursor.h = h;
      cursor.row0 = row * S::kM;
      if (S::kCuts) cursor.part = PartOf(work);
      cursor.queries_due = S::kQueriesLast;
      if (!S::kQueriesLast) BringQueries(&cursor);
      if (tile >= 0) BringAhead(tile, cursor);
      asked = Walk(work, following, asked, &cursor, tile >= 0);
      tile = -1;
    }
    Wait(QueryEmpty(cursor.query.at), cursor.query.phase ^ 1);
    if (lane_ == 0) {
      Items()[cursor.query.at].row0 = -1;
      Arrive(QueryFull(cursor.query.at));
    }
  }

  __device__ __forceinline__ void BringQueries(Cursor* cursor) {
    const int at = cursor->query.at;
    Wait(QueryEmpty(at), cursor->query.phase ^ 1);
    if (lane_ == 0) {
      Items()[at] = Item{cursor->b, cursor->h, cursor->row0, S::kCuts ? cursor->part : -1};
      const uint32_t to = base_ + at * S::kQueryBytes, full = QueryFull(at);
      ArriveExpect(full, S::kQueryBytes);
#pragma unroll
      for (int wg = 0; wg < S::kConsumers; ++wg) {
#pragma unroll
        for (int c = 0; c < kHead / kAtom; ++c) {
          CopyTensor(to + (wg * (kHead / kAtom) + c) * 64 * 128, &p_.query, full, c * kAtom, cursor->row0 + 64 * wg,
                     cursor->h * p_.query_step_h, cursor->b * p_.query_step_b);
        }
      }
    }
    cursor->query.Next();
    cursor->queries_due = false;
  }

  __device__ WorkItem ItemAt(int i, int rows) const {
    const AttentionParams& p = p_.attention;
    if (p_.work != nullptr) return p_.work[i];
    if (p.has_mask == 0) return {i, 0, 0, (p.T + S::kN - 1) / S::kN};
    const DeviceMask& mask = p.mask;
    // Rows of one place in their tables' orders, head by head: what workers take in one round costs about the same.
    const int section = min(p_.section, p.B * p.H);
    const int first = i / (section * rows) * section;
    const int heads = min(section, p.B * p.H - first);
    const int bh = first + (i - first * rows) % heads, place = (i - first * rows) / heads;
    const int b = bh / p.H, h = bh % p.H;
    const int table = mask.layout[(mask.layout_b == 1 ? 0 : b) * mask.layout_h + (mask.layout_h == 1 ? 0 : h)];
    const int row = mask.order[table * mask.rows + place];
    const int at = table * mask.rows + row;
    return {bh * rows + row, mask.row_ptr[at], mask.full_begin[at], mask.row_end[at]};
  }

  // What the mask says of a tile: tile -1 beyond an item's end.
  struct Asked {
    int tile, code;
  };
  // Of an item's tile i, as they are walked.
  __device__ __forceinline__ Asked Ask(const WorkItem& work, int i) const {
    Asked asked{-1, kEvery};
    if (i >= work.end - work.begin) return asked;
    const int at = EntryAt(work, i);
    asked.tile = at;
    if (p_.attention.has_mask != 0) {
      asked.tile = p_.attention.mask.key_tile[at];
      if (at < work.full) asked.code = p_.attention.mask.bits_id[at];
    }
    return asked;
  }
  // Of the first 32 tiles this lane's.
  __device__ __forceinline__ int Own() const { return S::kSplit > 1 ? team_ + S::kSplit * lane_ : lane_; }

  // The key tiles of an item: 32 are looked at together, those of which padding leaves nothing are passed over. asked:
  // the first 32; what is returned are the first 32 of the item that follows, asked for before this one's last tile has
  // room. ahead: the first tile is under way.
  __device__ __forceinline__ Asked Walk(const WorkItem& work, const WorkItem& following, Asked asked, Cursor* cursor,
                                        bool ahead) {
    Told own{-1, kEvery, 0}, held{-1, kNothing, 0};
    uint32_t kept = 0;
    int i = S::kSplit > 1 ? team_ : 0, from = 0;
    for (bool found = true; found;) {
      while (kept == 0 && i < work.end - work.begin) {
        own = Judge(cursor->b, asked);
        i += 32 * S::kSplit;
        if (i < work.end - work.begin) asked = Ask(work, i + S::kSplit * lane_);
        kept = __ballot_sync(~0u, own.tile >= 0);
      }
      found = kept != 0;
      from = __ffs(static_cast<int>(kept)) - 1;
      const int code = found ? __shfl_sync(~0u, own.code, from) : kEvery;
      if (!found) {
        held.flags |= kLast;
        asked = Ask(following, Own());
      }
      if (held.tile >= 0 || !found) {
        Publish(held, code, cursor, ahead);
        ahead = false;
      }
      held.code = code;
      held.flags = __shfl_sync(~0u, own.flags, from);
      held.tile = __shfl_sync(~0u, own.tile, from);
      kept &= kept - 1;
    }
    return asked;
  }

  // Of an asked tile, what its padding leaves: tile -1 where that is nothing.
  struct Told {
    int tile, code, flags;
  };
  __device__ __forceinline__ Told Judge(int b, const Asked& asked) const {
    const AttentionParams& p = p_.attention;
    Told told{asked.tile, asked.code, 0};
    if (told.tile < 0 || (p.pad_bits == nullptr && (told.tile + 1) * S::kN <= p.T)) return told;
    uint32_t all = ~0u, any = 0;
#pragma unroll
    for (int w = 0; w < S::kWords; ++w) {
      const uint32_t word = PadWord(b, told.tile, w);
      all &= word;
      any |= word;
    }
    if (all != ~0u) told.flags = kPads;
    if (all != ~0u && told.code == kEvery) told.code = kPadded;
    if (any == 0) told.tile = -1;
    return told;
  }

  // Which of 32 keys of a tile are there and no padding.
  __device__ __forceinline__ uint32_t PadWord(int b, int tile, int w) const {
    const AttentionParams& p = p_.attention;
    const int word = tile * S::kN / 32 + w;
    if (p.pad_bits != nullptr) {
      const int words = (p.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
      return word < words ? p.pad_bits[static_cast<int64_t>(b) * words + word] : 0u;
    }
    const int keys = min(32, max(0, p.T - 32 * word));
    return keys == 32 ? ~0u : (1u << keys) - 1u;
  }

  // Asks for what the first tile of all needs before the mask is read.
  __device__ __forceinline__ void BringAhead(int tile, const Cursor& cursor) const {
    if (lane_ != 0) return;
    Copy(&p_.key, Barrier(kKeyFull, 0), S::kKeys, tile, p_.key_step_h * cursor.g, p_.key_step_b * cursor.b);
    Copy(&p_.value, Barrier(kValueFull, 0), S::kValues, tile, p_.value_step_h * cursor.g, p_.value_step_b * cursor.b);
  }

  // next: the code of the tile behind it. ahead: its keys and values are under way.
  __device__ __forceinline__ void Publish(const Told& told, int next, Cursor* cursor, bool ahead) {
    const int at = cursor->stage.at;
    Entry& entry = Entries()[cursor->slot.at];
    Wait(Barrier(kKeyEmpty, at), cursor->stage.phase ^ 1);
    int more = 0, flags = told.flags;
    if ((flags & kPads) != 0) {
      if (lane_ < S::kWords) entry.pad[lane_] = PadWord(cursor->b, told.tile, lane_);
      __syncwarp();  // all of it is written before lane 0 says so
    }
    if constexpr (S::kExtras) {
      if (told.tile >= 0) more = BringBiases(told.tile, *cursor, &flags);
    }
    if (lane_ == 0) {
      entry.code = told.code;
      entry.flags = flags;
      entry.next = next;
      Bring(&p_.key, Barrier(kKeyFull, at), S::kKeys + at * S::kTileBytes, told.tile, p_.key_step_h * cursor->g,
            p_.key_step_b * cursor->b, ahead, more);
    }
    Wait(Barrier(kValueEmpty, at), cursor->stage.phase ^ 1);
    if (lane_ == 0) {
      Bring(&p_.value, Barrier(kValueFull, at), S::kValues + at * S::kTileBytes, told.tile, p_.value_step_h * cursor->g,
            p_.value_step_b * cursor->b, ahead);
    }
    if (S::kQueriesLast && cursor->queries_due) BringQueries(cursor);
    __syncwarp();
    cursor->stage.Next();
    cursor->slot.Next();
  }

  // The biases of a tile; the keys' barrier says when all is there. The bytes that are still to come, flags that the
  // biases add.
  __device__ __forceinline__ int BringBiases(int tile, const Cursor& cursor, int* flags) {
    const AttentionParams& p = p_.attention;
    const int at = cursor.stage.at;
    int bytes = 0;
    if (S::kPairs && p.bias != nullptr) {
      const int columns = p.bias_is_float != 0 ? 32 : 64;  // 128 bytes
      const int rows = p_.bias_one_row != 0 ? 1 : S::kM;
      bytes = S::kN / columns * rows * 128;
      for (int c = 0; lane_ == 0 && c < S::kN / columns; ++c) {
        CopyTensor(base_ + S::kBiases + at * S::kBiasBytes + c * S::kM * 128, &p_.bias, Barrier(kKeyFull, at),
                   tile * S::kN + c * columns, p_.bias_one_row != 0 ? 0 : cursor.row0, p_.bias_step_h * cursor.h,
                   p_.bias_step_b * cursor.b);
      }
    }
    if (p.relative_bias != nullptr) {
      // From the distance between the tile's first key and its last row on, in units of log2.
      const int radius = static_cast<int>(p.relative_bias_size / 2);
      const float* const middle = p.relative_bias + cursor.h * p.relative_bias_stride_h + radius;
      const int first = tile * S::kN - (p.query_position + cursor.row0) - (S::kM - 1);
      float* const to = reinterpret_cast<float*>(shared_ + S::kWindows) + at * S::kWindow;
      float least = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kWindow; i += 32) {
        const float bias = middle[max(-radius, min(radius, first + i + lane_))];
        least = fminf(least, bias);
        to[i + lane_] = bias == -INFINITY ? bias : MaxOrNan(bias * kLog2E, kLowest);
      }
      if (__any_sync(~0u, least == -INFINITY) != 0) *flags |= kBars;
    }
    __syncwarp();  // all of this is written before lane 0 says so
    return bytes;
  }

  // ahead: the copy is under way (its bytes may count off a barrier before that expects them); more: bytes that are,
  // too, beside the tensor's.
  __device__ __forceinline__ void Bring(const CUtensorMap* map, uint32_t full, int to, int tile, int h, int b,
                                        bool ahead, int more = 0) {
    if (tile < 0) {
      Arrive(full);
      return;
    }
    ArriveExpect(full, static_cast<uint32_t>(S::kTileBytes + more));
    if (!ahead) Copy(map, full, to, tile, h, b);
  }
  __device__ __forceinline__ void Copy(const CUtensorMap* map, uint32_t full, int to, int tile, int h, int b) const {
#pragma unroll
    for (int c = 0; c < kHead / kAtom; ++c) {
      CopyTensor(base_ + to + c * S::kN * 128, map, full, c * kAtom, tile * S::kN, h, b);
    }
  }

  // ---- a consumer: one warpgroup, 64 query rows ----
  static constexpr int kScores = S::kN / 2;  // a thread's share of 64 × N
  static constexpr int kOutputs = kHead / 2;
  static constexpr int kChains = 4;
  // Of a warpgroup alone: behind those of the turns.
  static constexpr int kOwnBarrier = 1 + S::kTeams * S::kConsumers;

  __device__ void Consume() {
    const AttentionParams& p = p_.attention;
    scale_ = S::kExtras ? 1.0f : p.scale * kLog2E;
    more_ = p.sink != nullptr || p.lse != nullptr;
    passes_ = p.pad_bits == nullptr ? 1 : 0;
    if (wg_ == S::kConsumers - 1) PassTurn();
    Ring<kQueries> query;
    Ring<S::kStages> keys, values;
    Ring<S::kSlots> slots;
    for (;;) {
      Wait(QueryFull(query.at), query.phase);
      const Item item = ReadItem(query.at);
      if (item.row0 < 0) break;
      Work(item, query.at, &keys, &values, &slots);
      query.Next();
    }
    if (wg_ == 0) TakeTurn();                // what was passed last is taken, so that no barrier is left half full
    if (S::kOwnOutput) WaitStoresRead<0>();  // shared memory goes with the CTA
  }

  __device__ __forceinline__ Item ReadItem(int at) {
    const Item item = Items()[at];
    return {Uniform(item.b), Uniform(item.h), Uniform(item.row0), S::kCuts ? Uniform(item.part) : -1};
  }
  __device__ __forceinline__ void TakeTurn() const {
    if constexpr (S::kConsumers > 1) SyncNamed(1 + team_ * S::kConsumers + wg_, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void PassTurn() const {
    if constexpr (S::kConsumers > 1) {
      ArriveNamed(1 + team_ * S::kConsumers + (wg_ + 1) % S::kConsumers, 2 * kWarpgroup);
    }
  }
  // Gives a buffer back for the warp: what its lanes read comes before.
  __device__ __forceinline__ void Release(uint32_t barrier) const {
    __syncwarp();
    if (kEveryLaneArrives || lane_ == 0) Arrive(barrier);
  }

  // Where the output takes their place they are given back after it.
  __device__ __forceinline__ void ReleaseQueries(int query) const {
    if (S::kSplit > 1 || S::kOwnOutput) Release(QueryEmpty(query));
  }

  __device__ __forceinline__ void Work(const Item& item, int query, Ring<S::kStages>* keys, Ring<S::kStages>* values,
                                       Ring<S::kSlots>* slots) {
    float o[kOutputs], s[kScores], high[2], sum[2];
    uint32_t weights[kScores / 2], bits[S::kOwnWords];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) high[r] = -INFINITY, sum[r] = 0.0f;

    Wait(Barrier(kKeyFull, keys->at), keys->phase);
    int code = Uniform(Entries()[slots->at].code);
    int flags = Uniform(Entries()[slots->at].flags);
    int next = Uniform(Entries()[slots->at].next);
    if constexpr (S::kPasses) {
      while (IsOthers(LeadOf(code))) {
        Pass(keys, values, slots);
        Wait(Barrier(kKeyFull, keys->at), keys->phase);
        code = Uniform(Entries()[slots->at].code);
        flags = Uniform(Entries()[slots->at].flags);
        next = Uniform(Entries()[slots->at].next);
      }
    }
    if (code == kNothing) {
      Release(Barrier(kKeyEmpty, keys->at));
      Wait(Barrier(kValueFull, values->at), values->phase);
      Release(Barrier(kValueEmpty, values->at));
      ReleaseQueries(query);
      keys->Next();
      values->Next();
      slots->Next();
      Finish(item, query, o, high, sum);
      return;
    }
    if (S::kTurnAtEnds) TakeTurn();
    Hold(s);
    ProductFence();
    Scores(query, keys->at, s);
    ProductCommit();
    if (S::kTurnAtEnds) PassTurn();
    FetchBits(code, bits);
    ProductWait<0>();
    Hold(s);
    if constexpr (S::kExtras) AddExtras(keys->at, flags, s);
    Release(Barrier(kKeyEmpty, keys->at));
    bool last = (flags & kLast) != 0 || (S::kPasses && IsOthers(TrailOf(next)));
    if (last) ReleaseQueries(query);
    keys->Next();
    float factor[2];
    typename Weights::Begun begun;
    if (code != kEvery) Forbid(code, flags, slots->at, bits, s);
    FetchBits(next, bits);
    const float none[2] = {0.0f, 0.0f};
    Weights::Raise(scale_, none, s, &begun, high, factor, sum);
    Weights::Weigh(&begun, s, sum);
    Pack(s, weights);
    while (!last) {
      slots->Next();
      Wait(Barrier(kKeyFull, keys->at), keys->phase);
      TakeTurn();
      Hold(s);
      Hold(o);
      Hold(weights);
      ProductFence();
      Scores(query, keys->at, s);
      ProductCommit();
      Wait(Barrier(kValueFull, values->at), values->phase);
      ProductFence();
      AddValues(values->at, weights, o);
      ProductCommit();
      PassTurn();
      code = next;
      int told[2];  // its flags, and what is next: asked for now, looked at after the softmax
      LoadShared(told, SharedAddress(&Entries()[slots->at].flags));
      ProductWait<1>();
      Hold(s);
      if constexpr (S::kExtras) AddExtras(keys->at, Uniform(told[0]), s);
      Release(Barrier(kKeyEmpty, keys->at));
      keys->Next();
      if (code != kEvery) Forbid(code, Uniform(told[0]), slots->at, bits, s);
      const float base[2] = {Weights::Base(high[0]), Weights::Base(high[1])};
      Weights::Lower(scale_, base, s, &begun);
      if (__builtin_expect(Weights::Exceeds(high, s, begun), 0)) {
        Weights::Raise(1.0f, base, s, &begun, high, factor, sum);
        if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f) != 0) Scale(factor, o);
      }
      // The branch keeps what follows from moving up: in one block with what is before, ptxas (13.0) moves the wait to
      // the block's start, and nothing covers the product any more. Here it is over, or nearly so, as the last of its
      // steps had begun before the scores were looked at; and its weights' registers are free for the next ones.
      ProductWait<0>();
      Hold(o);
      Hold(weights);
      Weights::Weigh(&begun, s, sum);
      Pack(s, weights);
      Release(Barrier(kValueEmpty, values->at));
      values->Next();
      next = Uniform(told[1]);
      last = (Uniform(told[0]) & kLast) != 0 || (S::kPasses && IsOthers(TrailOf(next)));
      if (last) ReleaseQueries(query);
      FetchBits(next, bits);
    }
    slots->Next();
    Wait(Barrier(kValueFull, values->at), values->phase);
    if (S::kTurnAtEnds) TakeTurn();
    Hold(o);
    Hold(weights);
    ProductFence();
    AddValues(values->at, weights, o);
    ProductCommit();
    if (S::kTurnAtEnds) PassTurn();
    ProductWait<0>();
    Hold(o);
    Release(Barrier(kValueEmpty, values->at));
    values->Next();
    Finish(item, query, o, high, sum);
    if constexpr (S::kPasses) {
      while (IsOthers(TrailOf(next))) {
        Wait(Barrier(kKeyFull, keys->at), keys->phase);
        next = Uniform(Entries()[slots->at].next);
        Pass(keys, values, slots);
      }
    }
  }

  // By what a walk says of a tile: whether it is the other warpgroups' alone. Padding may leave a warpgroup none of its
  // tiles; then it takes part in all.
  __device__ __forceinline__ bool IsOthers(int32_t groups) const { return (groups >> wg_ & passes_) != 0; }
  // Lets such a tile's buffers and the turn go on.
  __device__ __forceinline__ void Pass(Ring<S::kStages>* keys, Ring<S::kStages>* values, Ring<S::kSlots>* slots) const {
    Release(Barrier(kKeyEmpty, keys->at));
    TakeTurn();
    PassTurn();
    Wait(Barrier(kValueFull, values->at), values->phase);
    Release(Barrier(kValueEmpty, values->at));
    keys->Next();
    values->Next();
    slots->Next();
  }

  static __device__ __forceinline__ void Scale(const float (&factor)[2], float (&o)[kOutputs]) {
    ProductWait<0>();
    Hold(o);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) o[i] *= factor[i / 2 % 2];
  }

  // s = queries · keysᵀ
  __device__ __forceinline__ void Scores(int query, int stage, float (&s)[kScores]) const {
    const uint32_t a = inner_ + query * (S::kQueryBytes / 16) + wg_ * (kHead / kAtom * 64 * 128 / 16);
    const uint32_t b = inner_ + S::kKeys / 16 + stage * (S::kTileBytes / 16);
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
    const uint32_t b = across_ + S::kValues / 16 + stage * (S::kTileBytes / 16);
#pragma unroll
    for (int k = 0; k < S::kN / 16; ++k) {
      Wgmma<T>::Across(o, weights + 4 * k, Operand(b + k * 16 * 128 / 16));
    }
  }

  // Scale, softcap and biases: scores come out in units of log2. A bias of -inf forbids, whatever the product.
  __device__ __forceinline__ void AddExtras(int stage, int flags, float (&s)[kScores]) {
    const AttentionParams& p = p_.attention;
    float factor = p.scale * kLog2E;
    if (p.softcap > 0.0f) {
      // softcap * tanh(x / softcap), with an error of the softcap's last bits: what matters is the absolute one.
      const float in = p.scale * (2.0f * kLog2E) / p.softcap, most = p.softcap * kLog2E;
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] = most - 2.0f * most * Reciprocal(1.0f + Exp2(s[i] * in));
      factor = 1.0f;
    }
    if (S::kPairs && p.bias != nullptr) {
      if (p.bias_is_float != 0) {
        AddPairs<float>(stage, factor, s);
      } else {
        AddPairs<T>(stage, factor, s);
      }
      factor = 1.0f;
    }
    if (p.relative_bias != nullptr) {
      // 8 rows below are the distances of 8 keys before.
      const uint32_t own = base_ + S::kWindows + 4 * (stage * S::kWindow + (S::kM - 1) - row_ + lane_ % 4 * 2);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float before = LoadSharedFloat(own + 4 * (e - 8));
#pragma unroll
        for (int j = 0; j < kScores / 4; ++j) {
          const float here = LoadSharedFloat(own + 4 * (8 * j + e));
          s[4 * j + e] = s[4 * j + e] * factor + here;
          s[4 * j + 2 + e] = s[4 * j + 2 + e] * factor + before;
          before = here;
        }
      }
      if ((flags & kBars) != 0) {
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          if (LoadSharedFloat(own + 4 * (i / 4 * 8 + i % 2 - i / 2 % 2 * 8)) == -INFINITY) s[i] = -INFINITY;
        }
      }
      factor = 1.0f;
    }
    if (factor != 1.0f) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[i] *= factor;
    }
  }

  // Where this thread finds the biases of its rows in a stage's tile of type B, with how far its second row is from the
  // first. Chunk c of 16 bytes of row r of 128 bytes lies at c ^ (r % 8).
  template <typename B>
  __device__ __forceinline__ uint32_t OwnPairs(int stage, uint32_t* next) const {
    const bool one_row = p_.bias_one_row != 0;
    const auto lane = static_cast<uint32_t>(lane_);
    const uint32_t row = one_row ? 0 : static_cast<uint32_t>(row_) * 128 + (lane / 4 << 4);
    *next = one_row ? 0 : 8 * 128;
    const uint32_t at = base_ + S::kBiases + stage * S::kBiasBytes + row;
    return sizeof(B) == 4 ? (at ^ (lane % 4 / 2 << 4)) + lane % 2 * 8 : at + lane % 4 * 4;
  }
  // The biases of elements 4 j + 2 r and 4 j + 2 r + 1.
  template <typename B>
  static __device__ __forceinline__ float2 Pair(uint32_t own, int j, uint32_t row) {
    if constexpr (sizeof(B) == 4) {
      return LoadSharedFloats((own ^ static_cast<uint32_t>(j % 4 << 5)) + j / 4 * S::kM * 128 + row);
    } else {
      return Unpack<B>(LoadSharedWord((own ^ static_cast<uint32_t>(j % 8 << 4)) + j / 8 * S::kM * 128 + row));
    }
  }
  template <typename B>
  __device__ __forceinline__ void AddPairs(int stage, float factor, float (&s)[kScores]) const {
    uint32_t next;
    const uint32_t own = OwnPairs<B>(stage, &next);
    float least[kChains] = {};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 bias = Pair<B>(own, i / 4, i / 2 % 2 * next);
      s[i] = s[i] * factor + bias.x * kLog2E;
      s[i + 1] = s[i + 1] * factor + bias.y * kLog2E;
      least[i / 2 % kChains] = fminf(least[i / 2 % kChains], fminf(bias.x, bias.y));
    }
#pragma unroll
    for (int c = 1; c < kChains; ++c) least[0] = fminf(least[0], least[c]);
    // Few tiles have biases that are -inf, or become it in units of log2.
    if (__any_sync(~0u, least[0] * kLog2E == -INFINITY) == 0) return;
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      const float2 bias = Pair<B>(own, i / 4, i / 2 % 2 * next);
      s[i] = bias.x == -INFINITY ? -INFINITY : MaxOrNan(s[i], kLowest);
      s[i + 1] = bias.y == -INFINITY ? -INFINITY : MaxOrNan(s[i + 1], kLowest);
    }
  }

  // Asks for this thread's bits of a tile, early: they come while products are in flight.
  __device__ __forceinline__ void FetchBits(int code, uint32_t (&bits)[S::kOwnWords]) const {
    if (code < 0) return;
    const uint32_t* from = p_.attention.mask.bits +
                           (static_cast<int64_t>(S::kConsumers > 1 ? code & kIdMask : code) * S::kConsumers + wg_) *
                               S::kOwnWords * kWarpgroup +
                           threadIdx.x % kWarpgroup;
#pragma unroll
    for (int w = 0; w < S::kOwnWords; ++w) bits[w] = LoadWord(from + w * kWarpgroup);
  }

  // Takes away what a partial tile forbids.
  __device__ __forceinline__ void Forbid(int code, int flags, int slot, const uint32_t (&bits)[S::kOwnWords],
                                         float (&s)[kScores]) {
    uint32_t words[S::kOwnWords];
#pragma unroll
    for (int w = 0; w < S::kOwnWords; ++w) words[w] = code >= 0 ? bits[w] : ~0u;
    if ((flags & kPads) != 0) {
      const uint32_t* pad = Entries()[slot].pad;
#pragma unroll
      for (int w = 0; w < S::kOwnWords; ++w) {
        const uint32_t low = pad[2 * w], high = 2 * w + 1 < S::kWords ? pad[2 * w + 1] : 0;
        words[w] &= FragmentWord(low, high, low, high, lane_ % 4);
      }
    }
    // By the byte, so that the compiler moves seven bits at once to predicates.
#pragma unroll
    for (int w = 0; w < S::kOwnWords; ++w) {
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

  // ---- outputs: attention_sm90_output.cuh ----
  __device__ __forceinline__ void Finish(const Item& item, int query, float (&o)[kOutputs], const float (&high)[2],
                                         const float (&sum)[2]) const;
  __device__ __forceinline__ void FinishTogether(const Item& item, float (&o)[kOutputs], const float (&high)[2],
                                                 const float (&sum)[2]) const;
  __device__ __forceinline__ void StorePart(int part, const float (&o)[kOutputs], const float (&high)[2],
                                            const float (&sum)[2]) const;
  __device__ __forceinline__ void SyncOwn() const { SyncNamed(kOwnBarrier + team_ * S::kConsumers + wg_, kWarpgroup); }

  const Sm90Params& p_;
  unsigned char* shared_;
  uint32_t base_, inner_, across_;
  bool producer_;
  int team_, wg_, lane_, row_;
  float scale_ = 1.0f;
  bool more_ = false;   // there are sinks, or somebody asks for the sums
  int32_t passes_ = 0;  // 1: tiles may be left to the others
};

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#include "cuda/attention_sm90_output.cuh"
namespace stof {
namespace cuda {
namespace sm90 {

template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads, 1) AttentionKernel(const __grid_constant__ Sm90Params params) {
  extern __shared__ unsigned char shared[];
  const uint32_t lost = -SharedAddress(shared) & 1023u;
  Attention<S, T>(params, shared + lost).Run();
}

template <typename S, typename T>
int Launch(const Sm90Params& params, void* stream) {
  constexpr int kWorkers = S::kTeams / S::kSplit;  // of a CTA
  const auto ctas = static_cast<unsigned>((params.workers + kWorkers - 1) / kWorkers);
  const int error =
      LaunchKernel<Sm90Params, AttentionKernel<S, T>>(params, ctas, S::kThreads, S::kSharedBytes, stream, true);
  if constexpr (S::kCuts) {
    // Loaded with the other one, for the next problem may have parts, and be captured.
    const int loaded = LoadKernel<Sm90Params, JoinKernel<T, S::kHead>>(0);
    if (loaded != 0) return loaded;
    if (error == 0 && params.cut_rows > 0) {
      const auto joined = static_cast<unsigned>(params.cut_rows) * (S::kHead / kJoined);
      return LaunchKernel<Sm90Params, JoinKernel<T, S::kHead>>(params, joined, kWarpgroup, 0, stream, true);
    }
  }
  return error;
}

// The entry of a list of kernels; its tile and teams are the shape's.
template <typename S, typename T>
constexpr Sm90Kernel Describe(int64_t row, int64_t full, int64_t partial, int64_t reread = 0) {
  const TileCost cost = {row, full, partial, S::kSplit, reread, S::kCuts};
  return {S::kM, S::kN, S::kTeams / S::kSplit, S::kHead, cost, Launch<S, T>};
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_CUH_
