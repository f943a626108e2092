// SPDX-License-Identifier: Apache-2.0
// Choose blocks: which blocks of keys kernels of attention may leave out before they compute a score.
// docs/reference/operators.md has the definition; this is it in the words of kernels.
//
// Query block I of a head has rows kChosenRows * I ... of its sequence in this run, key block J keys kChosenKeys * J
// ... of it. A query patch is the mean of kPatchQueries neighbouring queries, those that exist; a key patch that of
// kPatchKeys neighbouring keys, those that exist and that pad does not forbid. A key patch without one has no estimate,
// -inf. Means are summed in fp32, and rounded to the type of the query where that is fp16 or bf16.
//
//   estimate(i, j) = softcap(scale * dot(query patch i, key patch j))                                          fp32
//   most(i)        = the largest estimate(i, j) of all key patches of the key blocks that count
//
// A key block counts where the mask and the sequence's number of keys allow a pair of it to the query block; a kernel
// may also count one that its tiles call partial, though it has no such pair. All key patches of it count.
//
// Key block J is chosen for query block I of a head where !(estimate(i, j) < ChosenBound(most(i), threshold)) for one
// of the query patches i of I and one of the key patches j of J, so that a NaN chooses; where J is 0; and where it has
// the key at the position of a query of I (OwnKeys). Each query head chooses for itself.
//
// What is not chosen may be left out. Kernels that leave out less are right, too.
#ifndef STOF_PLUGINS_CORE_CONTRACT_CHOSEN_BLOCKS_H_
#define STOF_PLUGINS_CORE_CONTRACT_CHOSEN_BLOCKS_H_

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/contract/attention_args.h"

namespace stof {

constexpr int64_t kChosenRows = 128, kChosenKeys = 128;  // of a block
constexpr int64_t kPatchQueries = 8, kPatchKeys = 8;     // powers of two from 2 to 32

// Calls with fewer queries in the longest sequence compute all blocks.
constexpr int64_t kLeastChoosingQueries = kChosenRows;

static_assert(kPatchQueries >= 2 && kPatchQueries <= 32 && (kPatchQueries & (kPatchQueries - 1)) == 0);
static_assert(kPatchKeys >= 2 && kPatchKeys <= 32 && (kPatchKeys & (kPatchKeys - 1)) == 0);

// Whether a call chooses blocks. Others compute all. A kernel may have further conditions.
STOF_ALWAYS_INLINE bool ChoosesBlocks(const AttentionArgs& args) {
  const ScoreArgs& scores = args.scores;
  return scores.block_threshold > 0.0f && args.shape.S >= kLeastChoosingQueries && scores.bias.data == nullptr &&
         scores.relative_bias.table == nullptr && !scores.has_relative_tables() && !args.relative_value.given() &&
         args.mask.dynamic == nullptr && args.mask.empty_rows != EmptyRows::kAll;
}

// Estimates that are not below it choose. most: the largest estimate of the query patch, NaN not counted; -inf: there
// is none. threshold: ScoreArgs::block_threshold, above 0. -inf never chooses.
STOF_ALWAYS_INLINE_HOST_DEVICE float ChosenBound(float most, float threshold) {
  const float bound = most + logf(threshold);
  return bound > -FLT_MAX ? bound : -FLT_MAX;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CHOSEN_BLOCKS_H_
