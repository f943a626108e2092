// SPDX-License-Identifier: Apache-2.0
// Choose blocks: which key blocks a query block of a head attends, by the products of patches. A key block is a key
// tile. plugins/core/contract/chosen_blocks.h has the definition.
#ifndef STOF_CPU_ATTENTION_CHOOSE_H_
#define STOF_CPU_ATTENTION_CHOOSE_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"
#include "cpu/attention/patches.h"
#include "cpu/attention/scores.h"

namespace stof {
namespace cpu {
namespace {

// Key patches whose estimates are computed at a time: whole panels and whole blocks.
constexpr int64_t kPatchesAtOnce = 64;
static_assert(kPatchesAtOnce % kPanel == 0 && kPatchesAtOnce % kPatchesOfBlock == 0);

// Finds the choice of each key block for the query block of the rows. The rows of one block share it.
template <bool kInPlace>
void AttentionWorker<kInPlace>::ChooseBlocks() {
  const int64_t blocks = (args_.shape.S + kChosenRows - 1) / kChosenRows, block = row0_ / kChosenRows;
  const int64_t wanted = (b_ * args_.shape.H + h_) * blocks + block;
  if (*scratch_.chosen_of == wanted) return;
  *scratch_.chosen_of = wanted;
  const int64_t row0 = block * kChosenRows, rows = Min(kChosenRows, EndOfQueries(args_, b_) - row0);
  FindCountingBlocks(row0, rows);
  const char* const query = static_cast<const char*>(args_.query.data) +
                            item_size_ * (BeginOfQueries(args_, args_.query.stride, b_) + h_ * args_.query.stride.h);
  MakeQueryPatches(args_, {query, args_.query.stride.s, item_size_}, row0, rows, scratch_);
  const int64_t patches = (rows + kPatchQueries - 1) / kPatchQueries, last = KeyTiles();
  float most[kQueryPatches];
  Fill(most, most + kQueryPatches, -kInf);
  EstimateBlocks(patches, most);
  uint8_t* const choices = scratch_.choices;
  for (int64_t i = 0; i < patches; ++i) {
    const float bound = ChosenBound(most[i], args_.scores.block_threshold);
    const float* const highest = scratch_.highest + i * problem_.key_tiles;
    for (int64_t tile = 0; tile < last; ++tile) {
      if (choices[tile] == kLeftOut && !(highest[tile] < bound)) choices[tile] = kChosen;
    }
  }
  // The first tokens, and the blocks at the positions of the queries.
  const OwnKeys& own = args_.scores.own_keys;
  const int64_t position = row0 + (own.first_rows == nullptr ? own.first : int64_t{own.first_rows[b_]});
  if (choices[0] == kLeftOut) choices[0] = kChosen;
  for (int64_t tile = Max(0, position / kChosenKeys); tile < last && tile * kChosenKeys < position + rows; ++tile) {
    if (choices[tile] == kLeftOut) choices[tile] = kChosen;
  }
  scratch_.chosen_of[1] = 0;
  for (int64_t tile = 0; tile < last; ++tile) scratch_.chosen_of[1] += choices[tile] == kChosen;
}

// Key blocks that the mask keeps for one of the rows are left out at first, others have no pair.
template <bool kInPlace>
void AttentionWorker<kInPlace>::FindCountingBlocks(int64_t row0, int64_t rows) const {
  const int64_t last = KeyTiles();
  uint8_t* const choices = scratch_.choices;
  const bool has_blocks = args_.mask.fixed.blocks() != nullptr;
  const bool is_listed = has_blocks || scratch_.has_runs;
  Fill<uint8_t>(choices, choices + problem_.key_tiles, is_listed ? kNoPair : kLeftOut);
  if (has_blocks) {
    const BlockMaskArrays& mask = problem_.mask;
    for (int64_t row = row0; row < row0 + rows; row += problem_.m) {
      const int64_t at = MaskRow(b_, h_, row);
      for (int32_t i = mask.row_ptr[at]; i < mask.row_ptr[at + 1]; ++i) {
        if (mask.key_tile[i] < last) choices[mask.key_tile[i]] = kLeftOut;
      }
    }
  } else if (scratch_.has_runs) {
    const DynamicMask& elements = *args_.mask.fixed.elements();
    const int64_t count =
        elements.runs(elements.self, b_, h_, row0, static_cast<int>(kChosenRows), problem_.n, 0, last, scratch_.runs);
    for (int64_t i = 0; i < count; ++i) {
      Fill<uint8_t>(choices + scratch_.runs[i].first, choices + scratch_.runs[i].last, kLeftOut);
    }
  }
}

// The highest estimate of each query patch in each key block that counts, and in all of them. A block with a NaN has
// NaN.
template <bool kInPlace>
void AttentionWorker<kInPlace>::EstimateBlocks(int64_t patches, float* most) const {
  const SequenceTiles& sequence = problem_.sequences[b_];
  const int64_t last = Min(sequence.last, KeyTiles()), size = args_.shape.D;
  constexpr int64_t kBlocks = kPatchesAtOnce / kPatchesOfBlock;
  const float* const packed =
      problem_.key_patches + kPanel * size * (sequence.first_patch_panel * args_.shape.G + g_ * sequence.patch_panels);
  for (int64_t first = sequence.first; first < last; first += kBlocks) {
    const int64_t count = Min(kBlocks, last - first);
    bool any = false;
    for (int64_t i = first; i < first + count; ++i) any |= scratch_.choices[i] != kNoPair;
    if (!any) continue;
    const int64_t panel = (first - sequence.first) * kPatchesOfBlock / kPanel;
    const int64_t panels = Min(kPatchesAtOnce / kPanel, sequence.patch_panels - panel);
    uint64_t found = 0;
    for (int64_t p = 0; p < panels; ++p) {
      found |= uint64_t{problem_.patches_found[sequence.first_patch_panel + panel + p]} << (kPanel * p);
    }
    for (int64_t row = 0; row < patches; row += kStrip) {
      float s[kStrip * kPatchesAtOnce];
      for (int64_t p = 0; p < panels; p += kBlockPanels) {
        PanelScores(static_cast<int>(patches - row), scratch_.query_patches + row * scratch_.ldq, scratch_.ldq,
                    packed + kPanel * size * (panel + p), static_cast<int>(Min(kBlockPanels, panels - p)), kNoStart,
                    s + kPanel * p, kPatchesAtOnce);
      }
      for (int64_t r = row; r < Min(row + kStrip, patches); ++r) {
        float* const estimates = s + (r - row) * kPatchesAtOnce;
        CapEstimates(panels * kPanel, estimates);
        for (int64_t i = 0; i < count; ++i) {
          if (scratch_.choices[first + i] == kNoPair) continue;
          const int64_t at = i * kPatchesOfBlock;
          scratch_.highest[r * problem_.key_tiles + first + i] = HighestEstimate(estimates + at, found >> at, &most[r]);
        }
      }
    }
  }
}

template <bool kInPlace>
inline void AttentionWorker<kInPlace>::CapEstimates(int64_t count, float* estimates) const {
  if (args_.scores.softcap == 0.0f) return;
  const V cap = Simd::Set1(args_.scores.softcap), argument = Simd::Set1(2.0f * kLog2E / args_.scores.softcap);
  for (int64_t i = 0; i < count; i += kWidth) {
    const V x = Simd::Load(estimates + i);
    const V capped = Simd::Mul(cap, TanhFromExponent(Simd::Mul(argument, x)));
    Simd::Store(estimates + i, Simd::WhereEqual(x, x, capped, x));
  }
}

// The highest of the estimates of a block whose patches have keys, NaN where one is NaN, and raises *most to the
// highest number.
template <bool kInPlace>
inline float AttentionWorker<kInPlace>::HighestEstimate(const float* estimates, uint64_t found, float* most) {
  float highest = -kInf;
  if constexpr (kPatchesOfBlock % kWidth == 0) {
    const V none = Simd::Set1(-kInf), infinite = Simd::Set1(kInf);
    V top = none;
    for (int64_t i = 0; i < kPatchesOfBlock; i += kWidth) {
      V x = Simd::Load(estimates + i);
      x = Simd::WhereEqual(x, x, x, infinite);  // vector maxima would lose a NaN
      top = Simd::Max(top, Simd::Where(static_cast<uint32_t>(found >> i), x, none));
    }
    highest = Simd::ReduceMax(top);
  } else {
    for (int64_t i = 0; i < kPatchesOfBlock; ++i) {
      const float x = estimates[i] == estimates[i] ? estimates[i] : kInf;
      if ((found >> i & 1u) != 0 && x > highest) highest = x;
    }
  }
  if (highest < kInf) {
    if (highest > *most) *most = highest;
    return highest;
  }
  for (int64_t i = 0; i < kPatchesOfBlock; ++i) {
    if ((found >> i & 1u) == 0) continue;
    if (estimates[i] != estimates[i]) highest = estimates[i];
    if (estimates[i] > *most) *most = estimates[i];
  }
  return highest;
}

// A tile that is left out counts where a key of it exists.
template <bool kInPlace>
void AttentionWorker<kInPlace>::CountLeftOut(int64_t tile) const {
  const int64_t words = problem_.n / 32;
  bool exists = problem_.pad_bits == nullptr;
  for (int64_t w = 0; w < words && !exists; ++w) {
    exists = problem_.pad_bits[(b_ * problem_.key_tiles + tile) * words + w] != 0;
  }
  if (!exists) return;
  const uint64_t pairs = PairsOf(tile);
  scratch_.skip_counts[0] += pairs, scratch_.skip_counts[1] += pairs;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_CHOOSE_H_
