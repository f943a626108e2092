// SPDX-License-Identifier: Apache-2.0
// The producer of the 9.0 kernels, one warp: it walks the tiles of its items and has the copy engine bring queries,
// keys and values. Members of Attention; included by cuda/attention/sm90/kernel.cuh, behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_
#define STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Which queries and keys an item is of.
template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::Locate(const WorkItem& work, Cursor* cursor) const {
  const AttentionParams& p = p_.attention;
  const int rows = Rows(), bh = work.item / rows;
  cursor->row0 = work.item % rows * S::kM;
  cursor->b = bh / p.H;
  cursor->h = bh % p.H;
  cursor->g = cursor->h / (p.H / p.G);
}

template <typename S, typename T>
__device__ typename Attention<S, T>::Begin Attention<S, T>::ReadBegin() const {
  const AttentionParams& p = p_.attention;
  const int worker = S::kSplit > 1 ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * S::kTeams + team_;
  Begin begin;
  if (worker >= p_.workers) return begin;
  begin.i = worker, begin.end = p.B * p.H * Rows();
  // Not by a constant 0 elsewhere: with that, ptxas (13.0) serializes the products of kernels that split (C7514).
  if constexpr (S::kHalves) begin.end <<= p_.halved;
  if (p_.work == nullptr) {
    if (p.has_mask != 0 || begin.i >= begin.end) return begin;
    begin.first = ItemAt(begin.i, Rows());
    Locate(begin.first, &begin.cursor);
    return begin;
  }
  const WorkStart& start = p_.work_start[worker];
  begin.i = start.begin, begin.end = start.end;
  begin.first = start.first;
  // Padding may leave nothing of it.
  if (p.pad_bits == nullptr) begin.tile = start.tile[S::kSplit > 1 ? team_ : 0], begin.second = start.tile[1];
  begin.code = start.code[S::kSplit > 1 ? team_ : 0];
  // Divisions take their time, of which there is some before the wait.
  Locate(begin.first, &begin.cursor);
  return begin;
}

// Has the first item's entries and the bits of its first tile come to the L2 cache.
template <typename S, typename T>
__device__ void Attention<S, T>::FetchPlanned(const Begin& begin) const {
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

// Has the first queries, keys and values come to the L2 cache while the kernel in front ends, whose CTAs do not end
// together. Into a cache that all writes go through, so that nothing is early.
template <typename S, typename T>
__device__ void Attention<S, T>::FetchInputs(const Begin& begin) const {
  // What is there already would be in the way of what comes next.
  if (p_.cold == 0 || p_.work == nullptr || begin.i >= begin.end || lane_ != 0) return;
  const int b = begin.cursor.b, h = begin.cursor.h, g = begin.cursor.g, row0 = begin.cursor.row0;
  constexpr int kAtoms = kHead / kAtom;
#pragma unroll
  for (int i = 0; i < S::kConsumers * kAtoms; ++i) {
    PrefetchTensor(&p_.query, i % kAtoms * kAtom, row0 + 64 * (i / kAtoms), h * p_.query_step_h, b * p_.query_step_b);
  }
  const int tiles[2] = {begin.tile, S::kSplit > 1 ? -1 : begin.second};
#pragma unroll
  for (const int tile : tiles) {
    if (tile < 0) return;
#pragma unroll
    for (int c = 0; c < kAtoms; ++c) {
      PrefetchTensor(&p_.key, c * kAtom, tile * S::kN, p_.key_step_h * g, p_.key_step_b * b);
    }
#pragma unroll
    for (int c = 0; c < kAtoms; ++c) {
      PrefetchTensor(&p_.value, c * kAtom, tile * S::kN, p_.value_step_h * g, p_.value_step_b * b);
    }
  }
}

template <typename S, typename T>
__device__ void Attention<S, T>::Produce(const Begin& begin) {
  const AttentionParams& p = p_.attention;
  const int rows = Rows();
  const bool planned = p_.work != nullptr;
  int i = begin.i, tile = begin.tile;
  const int end = begin.end;
  WorkItem work = begin.first;
  Cursor cursor;
  if (!planned && p.has_mask != 0 && i < end) work = ItemAt(i, rows);
  // Those with biases have no registers for it.
  if (S::kExtras || (!planned && p.has_mask != 0)) {
    Locate(work, &cursor);
  } else {
    cursor = begin.cursor;
  }
  Asked asked = Ask(work, Own());
  for (bool more = i < end; more;) {
    if (S::kCuts || S::kHalves) cursor.part = PartOf(work);
    if constexpr (S::kHalves) {
      if (!planned && p_.halved != 0) cursor.part = i % 2;
    }
    i += planned ? 1 : p_.workers;
    more = i < end;
    // The next item is asked for while this one is worked on.
    WorkItem following = {};
    if (!S::kDraws && more) following = ItemAt(i, rows);
    cursor.queries_due = S::kQueriesLast;
    if (!S::kQueriesLast) BringQueries(&cursor);
    if (tile >= 0) BringAhead(tile, cursor);
    asked = Walk(work, &following, asked, &cursor, tile >= 0);
    if constexpr (S::kDraws) more = following.item != kNoItem;
    tile = -1;
    work = following;
    // After the last one, too: of conditional divisions nothing can be made ready before the loop.
    Locate(work, &cursor);
  }
  Wait(QueryEmpty(cursor.query.at), cursor.query.phase ^ 1);
  if (lane_ == 0) {
    Items()[cursor.query.at].row0 = -1;
    Arrive(QueryFull(cursor.query.at));
  }
}

// A warp beside the producers': says what comes next, its team's own items and then what it draws, while the producer
// is still at the item before, for an answer takes two microseconds. In a named barrier it waits without instructions,
// which would be others'.
template <typename S, typename T>
__device__ void Attention<S, T>::TellNext() {
  team_ -= S::kTeams, shared_ -= S::kTeams * S::kTeamBytes, base_ -= S::kTeams * S::kTeamBytes;
  const AttentionParams& p = p_.attention;
  const int worker = static_cast<int>(blockIdx.x) * S::kTeams + team_, rows = Rows();
  if (worker >= p_.workers) return;
  const bool planned = p_.work != nullptr;
  int i = worker, end = p.B * p.H * rows;
  if constexpr (S::kHalves) end <<= p_.halved;
  if (planned) i = p_.work_start[worker].begin, end = p_.work_start[worker].end;
  if (i >= end) return;
  WorkItem next;
  do {
    i += planned ? 1 : p_.workers;
    next = {kNoItem, 0, 0, 0};
    if (i < end) {
      next = ItemAt(i, rows);
    } else if (p_.drawn != nullptr) {
      next = Draw();
    }
    if (lane_ == 0) {
      *Next() = next;
      Arrive(NextFull());
    }
    SyncNamed(kTakenBarrier + team_, 2 * 32);
  } while (next.item != kNoItem);
}

template <typename S, typename T>
__device__ __forceinline__ WorkItem Attention<S, T>::Draw() const {
  int at = 0;
  if (lane_ == 0) at = p_.drawn_begin + atomicAdd(p_.drawn, 1);
  at = __shfl_sync(~0u, at, 0);
  if (at < p_.drawn_end) return p_.work[at];
  // The last to find that nothing is left leaves the count as it was before the run.
  if (lane_ == 0 && at == p_.drawn_end + p_.workers - 1) *p_.drawn = 0;
  return {kNoItem, 0, 0, 0};
}

template <typename S, typename T>
__device__ __forceinline__ WorkItem Attention<S, T>::TakeNext(Cursor* cursor) {
  Wait(NextFull(), cursor->next_phase);
  cursor->next_phase ^= 1;
  const WorkItem next = *Next();
  ArriveNamed(kTakenBarrier + team_, 2 * 32);
  return next;
}

template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::BringQueries(Cursor* cursor) {
  const int at = cursor->query.at;
  Wait(QueryEmpty(at), cursor->query.phase ^ 1);
  if (lane_ == 0) {
    Items()[at] = Item{cursor->b, cursor->h, cursor->row0, S::kCuts || S::kHalves ? cursor->part : -1};
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

template <typename S, typename T>
__device__ WorkItem Attention<S, T>::ItemAt(int i, int rows) const {
  const AttentionParams& p = p_.attention;
  if (p_.work != nullptr) return p_.work[i];
  if constexpr (S::kHalves) i >>= p_.halved;
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

// Of an item's tile i, as they are walked.
template <typename S, typename T>
__device__ __forceinline__ typename Attention<S, T>::Asked Attention<S, T>::Ask(const WorkItem& work, int i) const {
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

// The key tiles of an item: 32 are looked at together, those of which padding leaves nothing are passed over. asked:
// the first 32; what is returned are the first 32 of the item that follows, asked for before this one's last tile has
// room. ahead: the first tile is under way.
template <typename S, typename T>
__device__ __forceinline__ typename Attention<S, T>::Asked Attention<S, T>::Walk(const WorkItem& work,
                                                                                 WorkItem* following, Asked asked,
                                                                                 Cursor* cursor, bool ahead) {
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
      if constexpr (S::kDraws) *following = TakeNext(cursor);
      asked = Ask(*following, Own());
    }
    if (held.tile >= 0 || !found) {
      Publish(held, code, cursor, ahead);
      // All multiprocessors begin at once: what they ask for besides would come before some of them's first keys.
      if (S::kSplit == 1 && cursor->begins) Wait(Barrier(kKeyFull, 0), 0);
      cursor->begins = false;
      ahead = false;
    }
    held.code = code;
    held.flags = __shfl_sync(~0u, own.flags, from);
    held.tile = __shfl_sync(~0u, own.tile, from);
    kept &= kept - 1;
  }
  return asked;
}

template <typename S, typename T>
__device__ __forceinline__ typename Attention<S, T>::Told Attention<S, T>::Judge(int b, const Asked& asked) const {
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
template <typename S, typename T>
__device__ __forceinline__ uint32_t Attention<S, T>::PadWord(int b, int tile, int w) const {
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
template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::BringAhead(int tile, const Cursor& cursor) const {
  if (lane_ != 0) return;
  Copy(&p_.key, Barrier(kKeyFull, 0), S::kKeys, tile, p_.key_step_h * cursor.g, p_.key_step_b * cursor.b);
  Copy(&p_.value, Barrier(kValueFull, 0), S::kValues, tile, p_.value_step_h * cursor.g, p_.value_step_b * cursor.b);
}

// next: the code of the tile behind it. ahead: its keys and values are under way.
template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::Publish(const Told& told, int next, Cursor* cursor, bool ahead) {
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
  } else if (kEveryLaneArrives) {
    Arrive(Barrier(kKeyFull, at));
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

// ahead: the copy is under way (its bytes may count off a barrier before that expects them); more: bytes that are,
// too, beside the tensor's.
template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::Bring(const CUtensorMap* map, uint32_t full, int to, int tile, int h,
                                                       int b, bool ahead, int more) {
  if (tile < 0) {
    Arrive(full);
    return;
  }
  ArriveExpect(full, static_cast<uint32_t>(S::kTileBytes + more));
  if (!ahead) Copy(map, full, to, tile, h, b);
}

template <typename S, typename T>
__device__ __forceinline__ void Attention<S, T>::Copy(const CUtensorMap* map, uint32_t full, int to, int tile, int h,
                                                      int b) const {
#pragma unroll
  for (int c = 0; c < kHead / kAtom; ++c) {
    CopyTensor(base_ + to + c * S::kN * 128, map, full, c * kAtom, tile * S::kN, h, b);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_
