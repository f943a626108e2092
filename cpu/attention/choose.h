// SPDX-License-Identifier: Apache-2.0
// Choose blocks: which key blocks a query block of a head attends, by the products of pooled queries and keys. A key
// block is a key tile. plugins/core/contract/chosen_blocks.h has the definition.
#ifndef STOF_CPU_ATTENTION_CHOOSE_H_
#define STOF_CPU_ATTENTION_CHOOSE_H_

#include <cstdint>

#include "cpu/attention/attention_worker.h"
#include "cpu/attention/pooling.h"
#include "cpu/attention/scores.h"

namespace stof {
namespace cpu {
namespace {

// Pooled keys whose estimates are computed at a time: whole panels and whole blocks.
constexpr int64_t kPooledKeysAtOnce = 64;
static_assert(kPooledKeysAtOnce % kPanel == 0 && kPooledKeysAtOnce % kPooledKeysOfBlock == 0);

// Finds the choice of each key block for the query block of the rows. The rows of one block share it.
template <bool kInPlace>
void AttentionWorker<kInPlace>::ChooseBlocks() {
  const int64_t blocks = (args_.shape.S + kBlockQueries - 1) / kBlockQueries, block = row0_ / kBlockQueries;
  const int64_t wanted = (b_ * args_.shape.H + h_) * blocks + block;
  if (*scratch_.chosen_of == wanted) return;
  *scratch_.chosen_of = wanted;
  const int64_t row0 = block * kBlockQueries, rows = Min(kBlockQueries, EndOfQueries(args_, b_) - row0);
  FindCandidates(row0, rows);
  const char* const query = static_cast<const char*>(args_.query.data) +
                            item_size_ * (BeginOfQueries(args_, args_.query.stride, b_) + h_ * args_.query.stride.h);
  PoolQueries(args_, {query, args_.query.stride.s, item_size_}, row0, rows, scratch_);
  const int64_t pooled = (rows + kPooledQueries - 1) / kPooledQueries, last = KeyTiles();
  float max_estimates[kPooledQueriesOfBlock];
  Fill(max_estimates, max_estimates + kPooledQueriesOfBlock, -kInf);
  EstimateBlocks(pooled, max_estimates);
  uint8_t* const choices = scratch_.choices;
  for (int64_t i = 0; i < pooled; ++i) {
    const float least = LeastChosenEstimate(max_estimates[i], args_.scores.block_threshold);
    const float* const block_max = scratch_.block_max + i * problem_.key_tiles;
    for (int64_t tile = 0; tile < last; ++tile) {
      if (choices[tile] == kLeftOut && !(block_max[tile] < least)) choices[tile] = kChosen;
    }
  }
  // The first tokens, and the diagonal blocks.
  const DiagonalStart& diagonal = args_.scores.diagonal;
  const int64_t position = row0 + (diagonal.first_rows == nullptr ? diagonal.first : int64_t{diagonal.first_rows[b_]});
  if (choices[0] == kLeftOut) choices[0] = kChosen;
  for (int64_t tile = Max(0, position / kBlockKeys); tile < last && tile * kBlockKeys < position + rows; ++tile) {
    if (choices[tile] == kLeftOut) choices[tile] = kChosen;
  }
  scratch_.chosen_of[1] = 0;
  for (int64_t tile = 0; tile < last; ++tile) scratch_.chosen_of[1] += choices[tile] == kChosen;
}

// Key blocks that the mask keeps for one of the rows are left out at first, others have no pair.
template <bool kInPlace>
void AttentionWorker<kInPlace>::FindCandidates(int64_t row0, int64_t rows) const {
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
        elements.runs(elements.self, b_, h_, row0, static_cast<int>(kBlockQueries), problem_.n, 0, last, scratch_.runs);
    for (int64_t i = 0; i < count; ++i) {
      Fill<uint8_t>(choices + scratch_.runs[i].first, choices + scratch_.runs[i].last, kLeftOut);
    }
  }
}

// The largest estimate of each pooled query in each candidate block, and in all of them. A block with a NaN has NaN.
template <bool kInPlace>
void AttentionWorker<kInPlace>::EstimateBlocks(int64_t pooled, float* max_estimates) const {
  const SequenceTiles& sequence = problem_.sequences[b_];
  const int64_t last = Min(sequence.last, KeyTiles()), size = args_.shape.D;
  constexpr int64_t kBlocks = kPooledKeysAtOnce / kPooledKeysOfBlock;
  const float* const packed =
      problem_.pooled_keys +
      kPanel * size * (sequence.first_pooled_panel * args_.shape.G + g_ * sequence.pooled_panels);
  for (int64_t first = sequence.first; first < last; first += kBlocks) {
    const int64_t count = Min(kBlocks, last - first);
    bool any = false;
    for (int64_t i = first; i < first + count; ++i) any |= scratch_.choices[i] != kNoPair;
    if (!any) continue;
    const int64_t panel = (first - sequence.first) * kPooledKeysOfBlock / kPanel;
    const int64_t panels = Min(kPooledKeysAtOnce / kPanel, sequence.pooled_panels - panel);
    uint64_t found = 0;
    for (int64_t p = 0; p < panels; ++p) {
      found |= uint64_t{problem_.pooled_keys_found[sequence.first_pooled_panel + panel + p]} << (kPanel * p);
    }
    for (int64_t row = 0; row < pooled; row += kStrip) {
      float s[kStrip * kPooledKeysAtOnce];
      for (int64_t p = 0; p < panels; p += kBlockPanels) {
        PanelScores(static_cast<int>(pooled - row), scratch_.pooled_queries + row * scratch_.ldq, scratch_.ldq,
                    packed + kPanel * size * (panel + p), static_cast<int>(Min(kBlockPanels, panels - p)), kNoStart,
                    s + kPanel * p, kPooledKeysAtOnce);
      }
      for (int64_t r = row; r < Min(row + kStrip, pooled); ++r) {
        float* const estimates = s + (r - row) * kPooledKeysAtOnce;
        CapEstimates(panels * kPanel, estimates);
        for (int64_t i = 0; i < count; ++i) {
          if (scratch_.choices[first + i] == kNoPair) continue;
          const int64_t at = i * kPooledKeysOfBlock;
          scratch_.block_max[r * problem_.key_tiles + first + i] =
              MaxOfBlock(estimates + at, found >> at, &max_estimates[r]);
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

// The largest estimate of a block, of pooled keys with a key; NaN where one is NaN. Raises *max_estimate to the largest
// number.
template <bool kInPlace>
inline float AttentionWorker<kInPlace>::MaxOfBlock(const float* estimates, uint64_t found, float* max_estimate) {
  float block_max = -kInf;
  if constexpr (kPooledKeysOfBlock % kWidth == 0) {
    const V none = Simd::Set1(-kInf), infinite = Simd::Set1(kInf);
    V vector_max = none;
    for (int64_t i = 0; i < kPooledKeysOfBlock; i += kWidth) {
      V x = Simd::Load(estimates + i);
      x = Simd::WhereEqual(x, x, x, infinite);  // vector maxima would lose a NaN
      vector_max = Simd::Max(vector_max, Simd::Where(static_cast<uint32_t>(found >> i), x, none));
    }
    block_max = Simd::ReduceMax(vector_max);
  } else {
    for (int64_t i = 0; i < kPooledKeysOfBlock; ++i) {
      const float x = estimates[i] == estimates[i] ? estimates[i] : kInf;
      if ((found >> i & 1u) != 0 && x > block_max) block_max = x;
    }
  }
  if (block_max < kInf) {
    if (block_max > *max_estimate) *max_estimate = block_max;
    return block_max;
  }
  for (int64_t i = 0; i < kPooledKeysOfBlock; ++i) {
    if ((found >> i & 1u) == 0) continue;
    if (estimates[i] != estimates[i]) block_max = estimates[i];
    if (estimates[i] > *max_estimate) *max_estimate = estimates[i];
  }
  return block_max;
}

// A tile that is left out is counted where a key of it exists.
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
