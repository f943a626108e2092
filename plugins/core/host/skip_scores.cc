// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/host/skip_scores.h"

#include <atomic>

#include "plugins/core/host/environment.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {
namespace {

// Sums of what calls counted. A reader may see a part of a call that still runs.
std::atomic<uint64_t> g_scored{0}, g_skipped{0};

}  // namespace

bool AreScoresSkipped() {
  static ProcessWide<const bool> are_skipped;
  return are_skipped.Get([] { return ReadVariableOr(Variable::kSkipScores, true); });
}

void AddSkipCounts(const SkipCounts& counts) {
  g_scored.fetch_add(counts.scored, std::memory_order_relaxed);
  g_skipped.fetch_add(counts.skipped, std::memory_order_relaxed);
}

SkipCounts ReadSkipCounts() {
  return {g_scored.load(std::memory_order_relaxed), g_skipped.load(std::memory_order_relaxed)};
}

void ResetSkipCounts() {
  g_scored.store(0, std::memory_order_relaxed);
  g_skipped.store(0, std::memory_order_relaxed);
}

}  // namespace stof
