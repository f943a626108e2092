// SPDX-License-Identifier: Apache-2.0
// The kernel that chooses blocks of keys by estimates of their scores: products of pooled queries and keys by wgmma.
// Plain persistent CTAs of 256 pooled queries; a warp decides for its 16.
//
// Two passes over the pooled keys: the first finds max_estimate(i), the second compares. Estimates cost 1/128 of the
// attention each time, and what lies between the passes are two numbers a thread, whatever the number of keys.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ESTIMATE_CUH_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ESTIMATE_CUH_

#include "cuda/attention/choose_blocks/layout.h"
#include "cuda/attention/choose_blocks/params.h"
#include "cuda/common/host_device.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm90.cuh"
#include "plugins/core/contract/chosen_blocks.h"

namespace stof {
namespace cuda {
namespace choose {

// The shape of a CTA. A unit: the pooled queries of one head and query block. kN: pooled keys of a tile.
template <int kSize_, bool kSoftcap_>
struct ChooseShape {
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr int kSize = kSize_,
                       kAtom = 64;  // elements of a pooled query or key, and of a swizzled row of 128 bytes
  static constexpr int kUnitRows = kBlockQueries / kPooledQueries, kBlockColumns = kBlockKeys / kPooledKeys;
  static constexpr int kN = kSize <= 128 ? 128 : 64, kTileBlocks = kN / kBlockColumns;
  static constexpr int kStages = kSize <= 64 ? 4 : kSize <= 128 ? 3 : 2;
  static constexpr int kGroups = 4, kRows = 64 * kGroups, kWarps = 4 * kGroups;  // consumers
  static constexpr int kThreads = kGroups * kWarpgroup + 32;
  static constexpr int kUnits = kRows / kUnitRows, kGroupUnits = 64 / kUnitRows;
  static constexpr int kWarpUnits = kUnitRows < 16 ? 16 / kUnitRows : 1;  // units of a warp, which may share one
  static constexpr int kQueryBytes = 2 * kRows * kSize, kTileBytes = 2 * kN * kSize;
  static constexpr int kTiles = kQueryBytes;  // offsets in shared memory
  static constexpr int kSlots = kTiles + kStages * kTileBytes;
  static constexpr int kBarriers = kSlots + 8 * kStages;
  static constexpr int kMaps = (kBarriers + 8 * (2 * kStages + 2) + 15) / 16 * 16;
  static constexpr int kToAlign = 1024;
  static_assert(kTileBlocks >= 1 && kTileBlocks <= 32, "a word has a bit for each key block of a tile");
  static_assert(kPooledTile % kN == 0 && kN == PooledTileRows(kSize), "tiles have whole pooled keys");
};

// Words of a set of key blocks.
STOF_HD constexpr int64_t SetWords(int64_t key_blocks) { return (key_blocks + 31) / 32; }
// Sets of each unit: the candidate blocks and those that are chosen; and the union of the former.
template <typename S>
constexpr int64_t SharedBytes(int64_t key_blocks) {
  return S::kMaps + 4 * SetWords(key_blocks) * (2 * S::kUnits + 1) + S::kToAlign;
}

template <typename S, typename T>
class BlockChooser {
  static constexpr int kScores = S::kN / 2;  // elements of a thread, of 64 x N

 public:
  __device__ BlockChooser(const BlockChoiceParams& p, unsigned char* shared)
      : p_(p),
        warp_(__shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        words_(static_cast<int>(SetWords(p.key_blocks))),
        base_(SharedAddress(shared)),
        sets_(reinterpret_cast<uint32_t*>(shared + S::kMaps)),
        slots_(reinterpret_cast<int2*>(shared + S::kSlots)) {}

  __device__ void Run() {
    LetNextStart();
    if (threadIdx.x == 0) {
      PrefetchMap(&p_.query_map);
      PrefetchMap(&p_.key_map);
      for (int i = 0; i < S::kStages; ++i) {
        InitBarrier(Full(i), 1);
        InitBarrier(Empty(i), S::kWarps);
      }
      InitBarrier(QueryFull(), 1);
      InitBarrier(QueryEmpty(), S::kWarps);
      FenceBarrierInit();
    }
    __syncthreads();
    WaitForPrevious();
    const int group = p_.attention.H / p_.attention.G;
    units_ = p_.row_blocks * group;
    const int heads = p_.attention.B * p_.attention.G, of_head = (units_ + S::kUnits - 1) / S::kUnits;
    const int items = heads * of_head, ctas = static_cast<int>(gridDim.x), cta = static_cast<int>(blockIdx.x);
    // Later query blocks attend more keys under causal masks: these items go first, and rounds change direction.
    for (int round = 0; round * ctas < items; ++round) {
      const int i = round * ctas + (round % 2 == 0 ? cta : ctas - 1 - cta);
      if (i >= items) continue;
      bg_ = i % heads;
      first_unit_ = (of_head - 1 - i / heads) * S::kUnits;
      if (warp_ == S::kWarps) {
        Produce();
      } else {
        Consume();
      }
    }
  }

 private:
  __device__ __forceinline__ uint32_t Full(int i) const { return base_ + S::kBarriers + 8 * i; }
  __device__ __forceinline__ uint32_t Empty(int i) const { return Full(S::kStages + i); }
  __device__ __forceinline__ uint32_t QueryFull() const { return Full(2 * S::kStages); }
  __device__ __forceinline__ uint32_t QueryEmpty() const { return Full(2 * S::kStages + 1); }
  // Sets of key blocks, as words of 32.
  __device__ __forceinline__ uint32_t* Candidates(int unit) const { return sets_ + 2 * unit * words_; }
  __device__ __forceinline__ uint32_t* Chosen(int unit) const { return Candidates(unit) + words_; }
  __device__ __forceinline__ uint32_t* AnyCandidates() const { return sets_ + 2 * S::kUnits * words_; }
  // The bits of a tile's key blocks.
  static __device__ __forceinline__ uint32_t BitsOf(const uint32_t* set, int tile) {
    constexpr uint32_t kAll = S::kTileBlocks == 32 ? ~0u : (1u << S::kTileBlocks % 32) - 1u;
    const int at = tile * S::kTileBlocks;
    return set[at / 32] >> at % 32 & kAll;
  }
  __device__ __forceinline__ void SyncAll() const { SyncNamed(1, S::kThreads); }
  __device__ __forceinline__ void Next() {
    if (++stage_ == S::kStages) stage_ = 0, phase_ ^= 1;
  }

  // ---- the producer warp ----
  __device__ void Produce() {
    if (lane_ == 0) {
      Wait(QueryEmpty(), query_phase_ ^ 1);
      ArriveExpect(QueryFull(), S::kQueryBytes);
      for (int group = 0; group < S::kGroups; ++group) {
        for (int c = 0; c < S::kSize / S::kAtom; ++c) {
          CopyTensor(base_ + (group * (S::kSize / S::kAtom) + c) * 64 * 128, &p_.query_map, QueryFull(), c * S::kAtom,
                     first_unit_ * S::kUnitRows + 64 * group, bg_, 0);
        }
      }
    }
    query_phase_ ^= 1;
    __syncwarp();
    SyncAll();  // consumers have set the candidates
    for (int w = lane_; w < words_; w += 32) {
      uint32_t any = 0;
      for (int unit = 0; unit < S::kUnits; ++unit) any |= Candidates(unit)[w];
      AnyCandidates()[w] = any;
    }
    __syncwarp();
    const int tiles = (p_.key_blocks + S::kTileBlocks - 1) / S::kTileBlocks;
    for (int pass = 0; pass < 2; ++pass) {
      for (int tile = 0; tile < tiles; ++tile) {
        if (BitsOf(AnyCandidates(), tile) != 0) PublishTile(tile);
      }
      PublishTile(-1);
    }
  }

  // Loads a tile of pooled keys and tells consumers whether all of them exist; tile -1: the end of a pass.
  __device__ __forceinline__ void PublishTile(int tile) {
    bool exist = true;
    if (tile >= 0 && lane_ < S::kN / 4) {
      const uint8_t* const from = p_.exists + int64_t{bg_ / p_.attention.G} * p_.key_rows + tile * S::kN + 4 * lane_;
      exist = *reinterpret_cast<const uint32_t*>(from) == 0x01010101u;
    }
    const bool all_exist = __all_sync(~0u, exist) != 0;
    // One lane waits: consumers may release the tile that it publishes before another lane looks at the barrier, which
    // would then wait for a phase that is over.
    if (lane_ == 0) {
      Wait(Empty(stage_), phase_ ^ 1);
      slots_[stage_] = make_int2(tile, all_exist ? 1 : 0);
      if (tile < 0) {
        Arrive(Full(stage_));
      } else {
        ArriveExpect(Full(stage_), S::kTileBytes);
        for (int c = 0; c < S::kSize / S::kAtom; ++c) {
          CopyTensor(base_ + S::kTiles + stage_ * S::kTileBytes + c * S::kN * 128, &p_.key_map, Full(stage_),
                     c * S::kAtom, tile * S::kN, bg_, 0);
        }
      }
    }
    __syncwarp();
    Next();
  }

  // ---- a consumer warp: 16 pooled queries, of one unit or several, or a part of one ----
  __device__ void Consume() {
    // The first warp of a unit has its sets.
    constexpr int kWarpRows = 16;
    const bool has_units = kWarpRows * warp_ % S::kUnitRows == 0;
    const int own_unit = kWarpRows * warp_ / S::kUnitRows;
    for (int i = 0; has_units && i < S::kWarpUnits; ++i) FindCandidates(own_unit + i);
    SyncAll();
    Wait(QueryFull(), query_phase_);
    query_phase_ ^= 1;
    float max_products[2] = {-INFINITY, -INFINITY};
    bool is_query[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = kWarpRows * warp_ + lane_ / 4 + 8 * r, unit = first_unit_ + row / S::kUnitRows;
      const int64_t query =
          int64_t{unit / (p_.attention.H / p_.attention.G)} * kBlockQueries + row % S::kUnitRows * kPooledQueries;
      is_query[r] = unit < units_ && query < p_.attention.S;
    }
    GoThroughTiles([&](int tile, const float (&s)[kScores]) { RaiseMaxProducts(tile, s, &max_products); });
    float least[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max_products[r] = fmaxf(max_products[r], __shfl_xor_sync(~0u, max_products[r], 1));
      max_products[r] = fmaxf(max_products[r], __shfl_xor_sync(~0u, max_products[r], 2));
      least[r] =
          LeastChosenEstimate(max_products[r] == -INFINITY ? -INFINITY : Estimate(max_products[r]), p_.threshold);
    }
    GoThroughTiles([&](int tile, const float (&s)[kScores]) { Vote(tile, s, least, is_query); });
    Release(QueryEmpty());
    // Votes of all warps of a unit; and the sets of this item, which all warps of the group have read.
    SyncNamed(2 + warp_ / 4, kWarpgroup);
    for (int i = 0; has_units && i < S::kWarpUnits; ++i) WriteList(own_unit + i);
  }

  __device__ __forceinline__ void Release(uint32_t barrier) const {
    __syncwarp();
    if (lane_ == 0) Arrive(barrier);
  }

  // The estimate of a product of a pooled query and a pooled key, which has the sign of the scale.
  __device__ __forceinline__ float Estimate(float product) const {
    const float score = fabsf(p_.attention.scale) * product;
    if constexpr (!S::kSoftcap) return score;
    return p_.attention.softcap * tanhf(score / p_.attention.softcap);
  }

  // Where a unit is: its head, and the query block.
  struct Place {
    int b, h, block;
    bool exists;
  };
  __device__ __forceinline__ Place PlaceOf(int unit) const {
    const AttentionParams& a = p_.attention;
    const int group = a.H / a.G, at = first_unit_ + unit;
    return {bg_ / a.G, bg_ % a.G * group + at % group, at / group, at < units_};
  }
  // Entries [begin, end) of the mask that the tiles are taken from, those from `full` on without an element mask.
  struct Entries {
    int begin, full, end;
  };
  __device__ __forceinline__ Entries EntriesOf(const Place& place) const {
    const DeviceMask& mask = p_.attention.mask;
    if (p_.attention.has_mask == 0) {
      const int keys = static_cast<int>(kBlockKeys) / p_.tiles_of_block;
      return {0, 0, (p_.attention.T + keys - 1) / keys};
    }
    const int table =
        mask.layout[(mask.layout_b == 1 ? 0 : place.b) * mask.layout_h + (mask.layout_h == 1 ? 0 : place.h)];
    const int row = table * mask.rows + place.block;
    return {mask.row_ptr[row], mask.full_begin[row], mask.row_end[row]};
  }
  __device__ __forceinline__ int TileOf(int entry) const {
    return p_.attention.has_mask == 0 ? entry : p_.attention.mask.key_tile[entry];
  }
  // tiles_of_block is 1 or 2.
  __device__ __forceinline__ int BlockOf(int tile) const { return p_.tiles_of_block == 2 ? tile / 2 : tile; }

  // Sets the candidate blocks, and chooses none.
  __device__ __forceinline__ void FindCandidates(int unit) const {
    uint32_t* const candidates = Candidates(unit);
    uint32_t* const chosen = Chosen(unit);
    const Place place = PlaceOf(unit);
    const bool is_all = place.exists && p_.attention.has_mask == 0;
    for (int w = lane_; w < words_; w += 32) {
      const int blocks = p_.key_blocks - 32 * w;
      candidates[w] = !is_all ? 0u : blocks >= 32 ? ~0u : (1u << blocks) - 1u;
      chosen[w] = 0;
    }
    __syncwarp();
    if (!place.exists) return;
    if (!is_all) {
      const Entries entries = EntriesOf(place);
      for (int entry = entries.begin + lane_; entry < entries.end; entry += 32) {
        const int block = BlockOf(TileOf(entry));
        atomicOr(&candidates[block / 32], 1u << block % 32);
      }
      __syncwarp();
    }
    if (p_.attention.pad_bits != nullptr) RemovePadding(place.b, candidates);
  }

  // Removes key blocks that are padding alone.
  __device__ __forceinline__ void RemovePadding(int b, uint32_t* candidates) const {
    const int words = (p_.attention.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
    const uint32_t* const pad = p_.attention.pad_bits + int64_t{b} * words;
    for (int w = 0; w < words_; ++w) {
      constexpr int kWords = kBlockKeys / 32;
      const int first = (32 * w + lane_) * kWords;
      uint32_t any = 0;
      for (int i = first; i < first + kWords && i < words; ++i) any |= pad[i];
      const uint32_t exist = __ballot_sync(~0u, any != 0);
      if (lane_ == 0) candidates[w] &= exist;
    }
    __syncwarp();
  }

  // Calls use(tile, products) for the tiles of a pass that have a candidate block of some unit of the warpgroup.
  template <typename Use>
  __device__ __forceinline__ void GoThroughTiles(const Use& use) {
    constexpr int kGroupUnits = S::kGroupUnits;
    const int group = warp_ / 4;
    for (;;) {
      Wait(Full(stage_), phase_);
      const int tile = __shfl_sync(~0u, slots_[stage_].x, 0), all_exist = __shfl_sync(~0u, slots_[stage_].y, 0);
      const bool has_candidate =
          tile >= 0 && lane_ < kGroupUnits && BitsOf(Candidates(group * kGroupUnits + lane_ % kGroupUnits), tile) != 0;
      if (__any_sync(~0u, has_candidate) == 0) {
        Release(Empty(stage_));
        Next();
        if (tile < 0) return;
        continue;
      }
      float s[kScores];
      Multiply(group, s);
      Release(Empty(stage_));
      Next();
      if (all_exist == 0) RemoveAbsent(tile, s);
      use(tile, s);
    }
  }

  __device__ __forceinline__ void Multiply(int group, float (&s)[kScores]) const {
    const uint32_t a = DescribeInner(base_) + group * (S::kSize / S::kAtom * 64 * 128 / 16);
    const uint32_t b = DescribeInner(base_ + S::kTiles) + stage_ * (S::kTileBytes / 16);
    PinRegisters(s);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < S::kSize / 16; ++k) {
      const int column = k % 4 * 32;  // bytes within a swizzled row
      Wgmma<T>::Inner(s, Operand(a + (k / 4 * 64 * 128 + column) / 16),
                      Operand(b + (k / 4 * S::kN * 128 + column) / 16), k > 0);
    }
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
  }

  // Products of pooled keys without a key become -inf.
  __device__ __forceinline__ void RemoveAbsent(int tile, float (&s)[kScores]) const {
    const uint8_t* const exists =
        p_.exists + int64_t{bg_ / p_.attention.G} * p_.key_rows + tile * S::kN + 2 * (lane_ % 4);
#pragma unroll
    for (int j = 0; j < S::kN / 8; ++j) {
      const uint32_t two = *reinterpret_cast<const uint16_t*>(exists + 8 * j);
      if ((two & 0xff) == 0) s[4 * j] = s[4 * j + 2] = -INFINITY;
      if (two >> 8 == 0) s[4 * j + 1] = s[4 * j + 3] = -INFINITY;
    }
  }

  // The largest of this thread's products of a key block, in one of its two rows.
  template <typename Max>
  __device__ __forceinline__ float MaxOfBlock(const float (&s)[kScores], int block, int r, const Max& max) const {
    if constexpr (S::kBlockColumns < 8) {  // two key blocks share 8 columns
      const int j = block / 2;
      return lane_ % 4 / 2 == block % 2 ? max(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]) : -INFINITY;
    } else {
      constexpr int kEights = S::kBlockColumns / 8;
      float largest = -INFINITY;
#pragma unroll
      for (int j = block * kEights; j < (block + 1) * kEights; ++j) {
        const float pair = max(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]);
        largest = j == block * kEights ? pair : max(largest, pair);
      }
      return largest;
    }
  }
  // The unit of a thread's row.
  __device__ __forceinline__ int UnitOfRow(int r) const { return (16 * warp_ + lane_ / 4 + 8 * r) / S::kUnitRows; }

  // Raises the largest products of this thread's rows, but for NaN.
  __device__ __forceinline__ void RaiseMaxProducts(int tile, const float (&s)[kScores],
                                                   float (*max_products)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t candidates = BitsOf(Candidates(UnitOfRow(r)), tile);
#pragma unroll
      for (int block = 0; block < S::kTileBlocks; ++block) {
        const float block_max = MaxOfBlock(s, block, r, [](float x, float y) { return fmaxf(x, y); });
        if ((candidates >> block & 1) != 0) (*max_products)[r] = fmaxf((*max_products)[r], block_max);
      }
    }
  }

  // Chooses key blocks of a tile for the units of the warp.
  __device__ __forceinline__ void Vote(int tile, const float (&s)[kScores], const float (&least)[2],
                                       const bool (&is_query)[2]) const {
    uint32_t chosen[S::kWarpUnits] = {};
#pragma unroll
    for (int block = 0; block < S::kTileBlocks; ++block) {
      uint32_t votes[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float block_max = MaxOfBlock(s, block, r, [](float x, float y) { return MaxOrNan(x, y); });
        votes[r] = __ballot_sync(~0u, is_query[r] && !(Estimate(block_max) < least[r]));
      }
#pragma unroll
      for (int i = 0; i < S::kWarpUnits; ++i) {
        uint32_t own = votes[0] | votes[1];
        if (S::kWarpUnits == 2) own = votes[i];
        if (S::kWarpUnits == 4) own = votes[i / 2] >> 16 * (i % 2) & 0xffffu;
        chosen[i] |= own != 0 ? 1u << block : 0u;
      }
    }
    if (lane_ != 0) return;
    const int at = tile * S::kTileBlocks;
#pragma unroll
    for (int i = 0; i < S::kWarpUnits; ++i) {
      const int unit = 16 * warp_ / S::kUnitRows + i;
      const uint32_t bits = chosen[i] & BitsOf(Candidates(unit), tile);
      if (bits != 0) atomicOr(&Chosen(unit)[at / 32], bits << at % 32);
    }
  }

  // Adds the blocks that are always chosen, and counts.
  __device__ __forceinline__ void CompleteChosen(int unit, const Place& place) const {
    const int64_t row0 = place.block * kBlockQueries, rows = min(kBlockQueries, p_.attention.S - row0);
    const int64_t past = p_.first_rows == nullptr ? 0 : p_.first_rows[place.b];
    const int64_t position = row0 + p_.first_position + past;
    const int64_t first = position / kBlockKeys, last = (position + rows - 1) / kBlockKeys;  // diagonal blocks
    const int64_t end = p_.first_rows == nullptr ? p_.attention.T : min(int64_t{p_.attention.T}, past + p_.key_offset);
    const int64_t end_block = (end - 1) / kBlockKeys, lacks = (end_block + 1) * kBlockKeys - end;  // keys of the last
    int64_t scored = 0, kept = 0;                                                                  // keys
    for (int w = lane_; w < words_; w += 32) {
      const uint32_t candidates = Candidates(unit)[w];
      uint32_t chosen = Chosen(unit)[w];
      if (w == 0) chosen |= 1u;
      if (first / 32 == w) chosen |= 1u << first % 32;
      if (last / 32 == w) chosen |= 1u << last % 32;
      chosen &= candidates;
      Chosen(unit)[w] = chosen;
      const auto keys = [&](uint32_t set) {
        const bool has_end = end_block / 32 == w && (set >> end_block % 32 & 1) != 0;
        return __popc(set) * kBlockKeys - (has_end ? lacks : 0);
      };
      scored += keys(candidates), kept += keys(chosen);
    }
    __syncwarp();
    if (p_.skip_counts == nullptr) return;
    for (int other = 16; other > 0; other /= 2) {
      scored += __shfl_xor_sync(~0u, scored, other);
      kept += __shfl_xor_sync(~0u, kept, other);
    }
    if (lane_ != 0) return;
    const int64_t skipped = scored - kept;
    if (p_.counts_kept == 0) scored = skipped;
    if (scored > 0) atomicAdd(p_.skip_counts, static_cast<unsigned long long>(rows * scored));
    if (skipped > 0) atomicAdd(p_.skip_counts + 1, static_cast<unsigned long long>(rows * skipped));
  }

  // Writes the tile list of a unit: the tiles of chosen blocks, in the order of the mask.
  __device__ __forceinline__ void WriteList(int unit) const {
    const Place place = PlaceOf(unit);
    if (!place.exists) return;
    CompleteChosen(unit, place);
    const Entries entries = EntriesOf(place);
    const int row = (place.b * p_.attention.H + place.h) * p_.row_blocks + place.block, begin = row * p_.list_stride;
    const uint32_t before = (1u << lane_) - 1u;
    int at = begin, full = begin;
    for (int first = entries.begin; first < entries.end; first += 32) {
      const int entry = first + lane_, tile = entry < entries.end ? TileOf(entry) : 0, block = BlockOf(tile);
      const bool is_kept = entry < entries.end && (Chosen(unit)[block / 32] >> block % 32 & 1) != 0;
      const uint32_t kept = __ballot_sync(~0u, is_kept), partial = __ballot_sync(~0u, is_kept && entry < entries.full);
      const int to = at + __popc(kept & before);
      if (is_kept) p_.key_tile[to] = tile;
      if (is_kept && entry < entries.full) p_.bits_id[to] = p_.attention.mask.bits_id[entry];
      at += __popc(kept), full += __popc(partial);
    }
    if (lane_ != 0) return;
    p_.row_ptr[row] = begin, p_.full_begin[row] = full, p_.row_end[row] = at;
  }

  const BlockChoiceParams& p_;
  const int warp_, lane_, words_;
  const uint32_t base_;
  uint32_t* const sets_;
  int2* const slots_;
  int units_ = 0, bg_ = 0, first_unit_ = 0;  // units of a KV head; those of this CTA begin at first_unit_
  int stage_ = 0;
  uint32_t phase_ = 0, query_phase_ = 0;
};

template <typename S, typename T>
__global__ void __launch_bounds__(S::kThreads, 1) ChooseBlocks(const __grid_constant__ BlockChoiceParams params) {
  extern __shared__ unsigned char shared[];
  const uint32_t lost = -SharedAddress(shared) & (S::kToAlign - 1u);
  BlockChooser<S, T>(params, shared + lost).Run();
}

}  // namespace choose
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_ESTIMATE_CUH_
