// SPDX-License-Identifier: Apache-2.0
// Skip by score and choose blocks, process-wide: whether attention may leave out key tiles, and how much it left out.
// ScoreArgs of plugins/core/contract/attention_args.h has the thresholds.
#ifndef STOF_PLUGINS_CORE_HOST_SKIP_SCORES_H_
#define STOF_PLUGINS_CORE_HOST_SKIP_SCORES_H_

#include <cstdint>

namespace stof {

// Pairs of queries and keys: rows times keys of each group of rows and key tile.
struct SkipCounts {
  uint64_t scored = 0;   // that a threshold decided about
  uint64_t skipped = 0;  // of these, pairs that were left out
};

// Whether thresholds count: STOF_SKIP_SCORES as this process first found it.
bool AreScoresSkipped();

// The counts of kernels on the CPU. Devices keep their own: AttentionBackend::add_skip_counts.
void AddSkipCounts(const SkipCounts& counts);
SkipCounts ReadSkipCounts();
void ResetSkipCounts();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_SKIP_SCORES_H_
