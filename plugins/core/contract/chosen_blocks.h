// SPDX-License-Identifier: Apache-2.0
// Choose blocks: which blocks of keys kernels of attention may leave out before they compute a score.
// docs/reference/operators.md has the definition; this is it in the words of kernels.
//
// Query block I of a head has rows kBlockQueries * I ... of its sequence in this run, key block J keys kBlockKeys * J
// ... of it. A pooled query is the mean of kPooledQueries neighbouring queries, those that exist; a pooled key that of
// kPooledKeys neighbouring keys, those that exist and that pad does not forbid. A pooled key without one has no
// estimate, -inf. Means are summed in fp32, and rounded to the type of the query where that is fp16 or bf16.
//
//   estimate(i, j)  = softcap(scale * dot(pooled query i, pooled key j))                                       fp32
//   max_estimate(i) = the largest estimate(i, j) of all pooled keys of the candidate blocks
//
// A key block is a candidate where the mask and the sequence's number of keys allow a pair of it to the query block; a
// kernel may have one more candidate that its tiles call partial, though it has no such pair. All pooled keys of a
// candidate take part.
//
// Candidate J is chosen for query block I of a head where !(estimate(i, j) < LeastChosenEstimate(max_estimate(i),
// threshold)) for one of the pooled queries i of I and one of the pooled keys j of J, so that a block with a NaN
// estimate is chosen; where J is 0; and where it is a diagonal block, with the key at the position of a query of I
// (DiagonalStart). Each query head chooses for itself.
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

constexpr int64_t kBlockQueries = 128, kBlockKeys = 128;  // of a block
// That a mean is of; powers of two from 2 to 32.
constexpr int64_t kPooledQueries = 8, kPooledKeys = 8;

// Calls with fewer queries in the longest sequence compute all blocks.
constexpr int64_t kMinQueriesToChoose = kBlockQueries;

static_assert(kPooledQueries >= 2 && kPooledQueries <= 32 && (kPooledQueries & (kPooledQueries - 1)) == 0);
static_assert(kPooledKeys >= 2 && kPooledKeys <= 32 && (kPooledKeys & (kPooledKeys - 1)) == 0);

// Whether a call chooses blocks. Others compute all. A kernel may have further conditions.
STOF_ALWAYS_INLINE bool ChoosesBlocks(const AttentionArgs& args) {
  const ScoreArgs& scores = args.scores;
  return scores.block_threshold > 0.0f && args.shape.S >= kMinQueriesToChoose && scores.bias.data == nullptr &&
         scores.relative_bias.table == nullptr && !scores.has_relative_tables() && !args.relative_value.given() &&
         args.mask.dynamic == nullptr && args.mask.empty_rows != EmptyRows::kAll;
}

// The least estimate that chooses. max_estimate: of the pooled query, without NaN; -inf: there is none. threshold:
// ScoreArgs::block_threshold, above 0. A block with a NaN estimate is chosen; -inf never selects one.
STOF_ALWAYS_INLINE_HOST_DEVICE float LeastChosenEstimate(float max_estimate, float threshold) {
  const float least = max_estimate + logf(threshold);
  return least > -FLT_MAX ? least : -FLT_MAX;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CHOSEN_BLOCKS_H_
