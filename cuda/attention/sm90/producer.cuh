// SPDX-License-Identifier: Apache-2.0
// The producer warp of the sm_90a kernels: it goes through the KV tiles of its work tiles and loads queries, keys and
// values by TMA; and the scheduler warp. Member functions of Attention; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_
#define STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// Sets the batch, heads and query rows of a work tile.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::Locate(const WorkTile& work_tile, Cursor* cursor) const {
  const AttentionParams& p = p_.attention;
  const int rows = Rows(), bh = work_tile.index / rows;
  cursor->row0 = work_tile.index % rows * S::kM;
  cursor->b = bh / p.H;
  cursor->h = bh % p.H;
  cursor->g = cursor->h / (p.H / p.G);
}

template <typename S, typename T>
__device__ typename Sm90Attention<S, T>::FirstWork Sm90Attention<S, T>::ReadFirstWork() const {
  const AttentionParams& p = p_.attention;
  const int cta =
      S::kSplit > 1 ? static_cast<int>(blockIdx.x) : static_cast<int>(blockIdx.x) * S::kPipelines + pipeline_;
  FirstWork first_work;
  if (cta >= p_.ctas) return first_work;
  first_work.i = cta, first_work.end = p.B * p.H * Rows();
  // Not a shift by a constant 0 elsewhere: ptxas (13.0) then serializes the wgmma of split pipelines (C7514).
  if constexpr (S::kHalfTiles) first_work.end <<= p_.half_tiles;
  if (p_.tiles == nullptr) {
    if (p.has_mask != 0 || first_work.i >= first_work.end) return first_work;
    first_work.first = WorkTileAt(first_work.i, Rows());
    Locate(first_work.first, &first_work.cursor);
    return first_work;
  }
  const CtaStart& start = p_.starts[cta];
  first_work.i = start.begin, first_work.end = start.end;
  first_work.first = start.first;
  // Padding may leave nothing of the first tile.
  if (p.pad_bits == nullptr)
    first_work.tile = start.tile[S::kSplit > 1 ? pipeline_ : 0], first_work.second = start.tile[1];
  first_work.code = start.code[S::kSplit > 1 ? pipeline_ : 0];
  // The divisions run before the wait for the previous kernel.
  Locate(first_work.first, &first_work.cursor);
  return first_work;
}

// Prefetches the tile list of the first work tile and the element mask of its first KV tile into L2.
template <typename S, typename T>
__device__ void Sm90Attention<S, T>::PrefetchMask(const FirstWork& first_work) const {
  if (p_.tiles == nullptr || first_work.i >= first_work.end) return;
  const DeviceMask& mask = p_.attention.mask;
  constexpr int kInLine = 32;  // words
  const int entry = first_work.first.begin + kInLine * lane_;
  if (lane_ <= S::kSplit && entry < first_work.first.end) {
    PrefetchLine(mask.key_tile + entry);
    PrefetchLine(mask.bits_id + entry);
  }
  constexpr int kLines = S::kConsumers * S::kMaskWords * kWarpgroup / kInLine;
  static_assert(kLines <= 32, "a lane for every line of a tile's bits");
  if (first_work.code >= 0 && lane_ < kLines) {
    PrefetchLine(mask.bits + (static_cast<int64_t>(first_work.code) * kLines + lane_) * kInLine);
  }
}

// Prefetches the first queries, keys and values into L2 while the previous kernel ends, whose CTAs do not end together.
// All writes go through L2, so that it never holds stale data.
template <typename S, typename T>
__device__ void Sm90Attention<S, T>::PrefetchInputs(const FirstWork& first_work) const {
  // With a warm L2 the prefetches would only delay later loads.
  if (p_.cold_l2 == 0 || p_.tiles == nullptr || first_work.i >= first_work.end || lane_ != 0) return;
  const int b = first_work.cursor.b, h = first_work.cursor.h, g = first_work.cursor.g, row0 = first_work.cursor.row0;
  constexpr int kAtoms = kHead / S::kInnerAtom;
#pragma unroll
  for (int i = 0; i < S::kConsumers * kAtoms; ++i) {
    PrefetchTensor(&p_.query, i % kAtoms * S::kInnerAtom, row0 + 64 * (i / kAtoms), h * p_.query_step_h,
                   b * p_.query_step_b);
  }
  const int tiles[2] = {first_work.tile, S::kSplit > 1 ? -1 : first_work.second};
#pragma unroll
  for (const int tile : tiles) {
    if (tile < 0) return;
#pragma unroll
    for (int c = 0; c < kAtoms; ++c) {
      PrefetchTensor(&p_.key, c * S::kInnerAtom, tile * S::kN, p_.key_step_h * g, p_.key_step_b * b);
    }
    if constexpr (S::kFp8) {
      PrefetchTensor(&p_.value, tile * S::kN, 0, p_.value_step_h * g, p_.value_step_b * b);
    } else {
#pragma unroll
      for (int c = 0; c < kHead / kAtom; ++c) {
        PrefetchTensor(&p_.value, c * kAtom, tile * S::kN, p_.value_step_h * g, p_.value_step_b * b);
      }
    }
  }
}

template <typename S, typename T>
__device__ void Sm90Attention<S, T>::Produce(const FirstWork& first_work) {
  const AttentionParams& p = p_.attention;
  const int rows = Rows();
  const bool scheduled = p_.tiles != nullptr;
  int i = first_work.i, tile = first_work.tile;
  const int end = first_work.end;
  WorkTile work_tile = first_work.first;
  Cursor cursor;
  if (!scheduled && p.has_mask != 0 && i < end) work_tile = WorkTileAt(i, rows);
  // Kernels with biases have no registers for it.
  if (S::kScoreMod || (!scheduled && p.has_mask != 0)) {
    Locate(work_tile, &cursor);
  } else {
    cursor = first_work.cursor;
  }
  KvTile lane_tile = ReadKvTile(work_tile, LaneTile());
  for (bool more = i < end; more;) {
    if (S::kSplitsRows || S::kHalfTiles) cursor.subtile = SubtileOf(work_tile);
    if constexpr (S::kHalfTiles) {
      if (!scheduled && p_.half_tiles != 0) cursor.subtile = i % 2;
    }
    i += scheduled ? 1 : p_.ctas;
    more = i < end;
    // The next work tile is read while this one is loaded.
    WorkTile next_tile = {};
    if (!S::kDynamic && more) next_tile = WorkTileAt(i, rows);
    cursor.queries_due = S::kQueriesAfterKeys;
    if (!S::kQueriesAfterKeys) LoadQueries(&cursor);
    if (tile >= 0) LoadFirstKvTile(tile, cursor);
    lane_tile = ProduceKvTiles(work_tile, &next_tile, lane_tile, &cursor, tile >= 0);
    if constexpr (S::kDynamic) more = next_tile.index != kNoTile;
    tile = -1;
    work_tile = next_tile;
    // Also after the last one: the compiler cannot prepare conditional divisions ahead of the loop.
    Locate(work_tile, &cursor);
  }
  Wait(QueryEmpty(cursor.query.at), cursor.query.phase ^ 1);
  if (lane_ == 0) {
    TileInfos()[cursor.query.at].row0 = -1;
    Arrive(QueryFull(cursor.query.at));
  }
}

// The scheduler warp of a pipeline: it hands the next work tile to the producer, first those of the CTA, then dynamic
// ones. It works one tile ahead, as an atomic takes two microseconds. It waits in a named barrier, which issues no
// instructions.
template <typename S, typename T>
__device__ void Sm90Attention<S, T>::RunScheduler() {
  pipeline_ -= S::kPipelines, shared_ -= S::kPipelines * S::kPipelineBytes, base_ -= S::kPipelines * S::kPipelineBytes;
  const AttentionParams& p = p_.attention;
  const int cta = static_cast<int>(blockIdx.x) * S::kPipelines + pipeline_, rows = Rows();
  if (cta >= p_.ctas) return;
  const bool scheduled = p_.tiles != nullptr;
  int i = cta, end = p.B * p.H * rows;
  if constexpr (S::kHalfTiles) end <<= p_.half_tiles;
  if (scheduled) i = p_.starts[cta].begin, end = p_.starts[cta].end;
  if (i >= end) return;
  WorkTile next;
  do {
    i += scheduled ? 1 : p_.ctas;
    next = {kNoTile, 0, 0, 0};
    if (i < end) {
      next = WorkTileAt(i, rows);
    } else if (p_.tile_counter != nullptr) {
      next = FetchDynamicTile();
    }
    if (lane_ == 0) {
      *NextTile() = next;
      Arrive(NextTileFull());
    }
    SyncNamed(kNextTakenBarrier + pipeline_, 2 * 32);
  } while (next.index != kNoTile);
}

template <typename S, typename T>
__device__ __forceinline__ WorkTile Sm90Attention<S, T>::FetchDynamicTile() const {
  int at = 0;
  if (lane_ == 0) at = p_.dynamic_begin + atomicAdd(p_.tile_counter, 1);
  at = __shfl_sync(~0u, at, 0);
  if (at < p_.dynamic_end) return p_.tiles[at];
  // The CTA that comes last resets the counter for the next run.
  if (lane_ == 0 && at == p_.dynamic_end + p_.ctas - 1) *p_.tile_counter = 0;
  return {kNoTile, 0, 0, 0};
}

template <typename S, typename T>
__device__ __forceinline__ WorkTile Sm90Attention<S, T>::ReceiveNextTile(Cursor* cursor) {
  Wait(NextTileFull(), cursor->next_phase);
  cursor->next_phase ^= 1;
  const WorkTile next = *NextTile();
  ArriveNamed(kNextTakenBarrier + pipeline_, 2 * 32);
  return next;
}

template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::LoadQueries(Cursor* cursor) {
  const int at = cursor->query.at;
  Wait(QueryEmpty(at), cursor->query.phase ^ 1);
  if (lane_ == 0) {
    TileInfos()[at] =
        WorkTileInfo{cursor->b, cursor->h, cursor->row0, S::kSplitsRows || S::kHalfTiles ? cursor->subtile : -1};
    const uint32_t to = base_ + at * S::kQueryBytes, full = QueryFull(at);
    ArriveExpect(full, S::kQueryBytes);
#pragma unroll
    for (int wg = 0; wg < S::kConsumers; ++wg) {
#pragma unroll
      for (int c = 0; c < kHead / S::kInnerAtom; ++c) {
        CopyTensor(to + (wg * (kHead / S::kInnerAtom) + c) * 64 * S::kInnerSpan, &p_.query, full, c * S::kInnerAtom,
                   cursor->row0 + 64 * wg, cursor->h * p_.query_step_h, cursor->b * p_.query_step_b);
      }
    }
  }
  cursor->query.Next();
  cursor->queries_due = false;
}

template <typename S, typename T>
__device__ WorkTile Sm90Attention<S, T>::WorkTileAt(int i, int rows) const {
  const AttentionParams& p = p_.attention;
  if (p_.tiles != nullptr) return p_.tiles[i];
  if constexpr (S::kHalfTiles) i >>= p_.half_tiles;
  if (p.has_mask == 0) return {i, 0, 0, (p.T + S::kN - 1) / S::kN};
  const DeviceMask& mask = p.mask;
  // The i-th longest tile row of every head of the L2 group, head by head: what CTAs compute at the same time costs
  // about the same.
  const int l2_heads = min(p_.l2_heads, p.B * p.H);
  const int first = i / (l2_heads * rows) * l2_heads;
  const int heads = min(l2_heads, p.B * p.H - first);
  const int bh = first + (i - first * rows) % heads, place = (i - first * rows) / heads;
  const int b = bh / p.H, h = bh % p.H;
  const int table = mask.layout[(mask.layout_b == 1 ? 0 : b) * mask.layout_h + (mask.layout_h == 1 ? 0 : h)];
  const int row = mask.order[table * mask.rows + place];
  const int at = table * mask.rows + row;
  return {bh * rows + row, mask.row_ptr[at], mask.full_begin[at], mask.row_end[at]};
}

// KV tile i of a work tile, in the order for kernels without a schedule.
template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::KvTile Sm90Attention<S, T>::ReadKvTile(
    const WorkTile& work_tile, int i) const {
  KvTile lane_tile{-1, kFull};
  if (i >= work_tile.end - work_tile.begin) return lane_tile;
  const int at = EntryAt(work_tile, i);
  lane_tile.tile = at;
  if (p_.attention.has_mask != 0) {
    lane_tile.tile = p_.attention.mask.key_tile[at];
    if (at < work_tile.full) lane_tile.code = p_.attention.mask.bits_id[at];
  }
  return lane_tile;
}

// Produces the KV tiles of a work tile. Lanes look at 32 of them together and drop those that padding empties.
// lane_tile: of the first 32, this lane's. Returns the same for the next work tile, read before the last tile of this
// one has a free stage. in_flight: the first tile is being loaded.
template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::KvTile Sm90Attention<S, T>::ProduceKvTiles(
    const WorkTile& work_tile, WorkTile* next_tile, KvTile lane_tile, Cursor* cursor, bool in_flight) {
  PaddedTile own{-1, kFull, 0}, pending{-1, kEmpty, 0};
  uint32_t kept = 0;
  int i = S::kSplit > 1 ? pipeline_ : 0, from = 0;
  for (bool found = true; found;) {
    while (kept == 0 && i < work_tile.end - work_tile.begin) {
      own = ApplyPadding(cursor->b, lane_tile);
      i += 32 * S::kSplit;
      if (i < work_tile.end - work_tile.begin) lane_tile = ReadKvTile(work_tile, i + S::kSplit * lane_);
      kept = __ballot_sync(~0u, own.tile >= 0);
    }
    found = kept != 0;
    from = __ffs(static_cast<int>(kept)) - 1;
    const int code = found ? __shfl_sync(~0u, own.code, from) : kFull;
    if (!found) {
      pending.flags |= kLast;
      if constexpr (S::kDynamic) *next_tile = ReceiveNextTile(cursor);
      lane_tile = ReadKvTile(*next_tile, LaneTile());
    }
    if (pending.tile >= 0 || !found) {
      PublishKvTile(pending, code, cursor, in_flight);
      // All SMs start at once: further loads would delay the first keys of some.
      if (S::kSplit == 1 && cursor->is_first) Wait(Barrier(kKeyFull, 0), 0);
      cursor->is_first = false;
      in_flight = false;
    }
    pending.code = code;
    pending.flags = __shfl_sync(~0u, own.flags, from);
    pending.tile = __shfl_sync(~0u, own.tile, from);
    kept &= kept - 1;
  }
  return lane_tile;
}

template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::PaddedTile Sm90Attention<S, T>::ApplyPadding(
    int b, const KvTile& lane_tile) const {
  const AttentionParams& p = p_.attention;
  PaddedTile padded{lane_tile.tile, lane_tile.code, 0};
  if (padded.tile < 0 || (p.pad_bits == nullptr && (padded.tile + 1) * S::kN <= p.T)) return padded;
  uint32_t all = ~0u, any = 0;
#pragma unroll
  for (int w = 0; w < S::kPaddingWords; ++w) {
    const uint32_t word = PaddingWord(b, padded.tile, w);
    all &= word;
    any |= word;
  }
  if (all != ~0u) padded.flags = kHasPadding;
  if (all != ~0u && padded.code == kFull) padded.code = kPadded;
  if (any == 0) padded.tile = -1;
  return padded;
}

// A bit for each of 32 keys of a tile that exist and are not padding.
template <typename S, typename T>
__device__ __forceinline__ uint32_t Sm90Attention<S, T>::PaddingWord(int b, int tile, int w) const {
  const AttentionParams& p = p_.attention;
  const int word = tile * S::kN / 32 + w;
  if (p.pad_bits != nullptr) {
    const int words = (p.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
    return word < words ? p.pad_bits[static_cast<int64_t>(b) * words + word] : 0u;
  }
  const int keys = min(32, max(0, p.T - 32 * word));
  return keys == 32 ? ~0u : (1u << keys) - 1u;
}

// Loads the very first KV tile, before the mask is read.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::LoadFirstKvTile(int tile, const Cursor& cursor) const {
  if (lane_ != 0) return;
  CopyKeys(0, tile, cursor);
  CopyValues(0, tile, cursor);
}

// Publishes a KV tile to the consumers and loads it. next: the code of the tile after it. in_flight: it is being
// loaded.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::PublishKvTile(const PaddedTile& padded, int next, Cursor* cursor,
                                                                   bool in_flight) {
  const int at = cursor->stage.at;
  Entry& entry = Entries()[cursor->slot.at];
  Wait(Barrier(kKeyEmpty, at), cursor->stage.phase ^ 1);
  int more = 0, flags = padded.flags;
  if ((flags & kHasPadding) != 0) {
    if (lane_ < S::kPaddingWords) entry.pad[lane_] = PaddingWord(cursor->b, padded.tile, lane_);
    __syncwarp();  // all lanes have written before lane 0 arrives
  }
  if constexpr (S::kScoreMod) {
    if (padded.tile >= 0) more = LoadBiases(padded.tile, *cursor, &flags);
  }
  if (lane_ == 0) {
    entry.code = padded.code;
    entry.flags = flags;
    entry.next = next;
    ExpectAndCopy<kKeyFull>(at, padded.tile, *cursor, in_flight, more);
  } else if (kEveryLaneArrives) {
    Arrive(Barrier(kKeyFull, at));
  }
  Wait(Barrier(kValueEmpty, at), cursor->stage.phase ^ 1);
  if (lane_ == 0) {
    ExpectAndCopy<kValueFull>(at, padded.tile, *cursor, in_flight);
  }
  if (S::kQueriesAfterKeys && cursor->queries_due) LoadQueries(cursor);
  __syncwarp();
  cursor->stage.Next();
  cursor->slot.Next();
}

// Arrives at a stage's barrier, expecting the keys or the values of a tile, and loads them. in_flight: they are being
// loaded, and their bytes may complete before this expects them. more: further bytes that complete on the barrier.
template <typename S, typename T>
template <typename Sm90Attention<S, T>::Kind kFull>
__device__ __forceinline__ void Sm90Attention<S, T>::ExpectAndCopy(int stage, int tile, const Cursor& cursor,
                                                                   bool in_flight, int more) {
  constexpr int kBytes = kFull == kValueFull ? S::kValueBytes : S::kKeyBytes + (S::kInt8 ? S::kScaleBytes : 0);
  if (tile < 0) {
    Arrive(Barrier(kFull, stage));
    return;
  }
  ArriveExpect(Barrier(kFull, stage), static_cast<uint32_t>(kBytes + more));
  if (in_flight) return;
  if constexpr (kFull == kValueFull) {
    CopyValues(stage, tile, cursor);
  } else {
    CopyKeys(stage, tile, cursor);
  }
}

// Loads the keys of a tile into a stage: their bytes complete on its barrier, which may expect them later. With 8-bit
// operands also the tile's scales.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::CopyKeys(int stage, int tile, const Cursor& cursor) const {
  const uint32_t full = Barrier(kKeyFull, stage), to = base_ + S::kKeys + stage * S::kKeyBytes;
#pragma unroll
  for (int c = 0; c < kHead / S::kInnerAtom; ++c) {
    CopyTensor(to + c * S::kN * S::kInnerSpan, &p_.key, full, c * S::kInnerAtom, tile * S::kN, p_.key_step_h * cursor.g,
               p_.key_step_b * cursor.b);
  }
  if constexpr (S::kInt8) {
    const AttentionParams& p = p_.attention;
    const int64_t at = (static_cast<int64_t>(cursor.b) * p.G + cursor.g) * ((p.T + S::kN - 1) / S::kN) + tile;
    CopyBytes(base_ + S::kScales + stage * S::kScaleBytes, p_.tile_scales + at * kTileScales, S::kScaleBytes, full);
  }
}

template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::CopyValues(int stage, int tile, const Cursor& cursor) const {
  const uint32_t full = Barrier(kValueFull, stage), to = base_ + S::kValues + stage * S::kValueBytes;
  const int h = p_.value_step_h * cursor.g, b = p_.value_step_b * cursor.b;
  if constexpr (S::kFp8) {
    CopyTensor(to, &p_.value, full, tile * S::kN, 0, h, b);
  } else {
#pragma unroll
    for (int c = 0; c < kHead / kAtom; ++c)
      CopyTensor(to + c * S::kN * 128, &p_.value, full, c * kAtom, tile * S::kN, h, b);
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_PRODUCER_CUH_
