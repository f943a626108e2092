// SPDX-License-Identifier: Apache-2.0
// What a call of attention on the CPU does, before any of it runs: the key tiles of each sequence, how few queries are
// split along the keys, and how keys are packed.
#ifndef STOF_CPU_ATTENTION_PLAN_H_
#define STOF_CPU_ATTENTION_PLAN_H_

#include <cstdint>
#include <vector>

#include "cpu/attention/attention.h"
#include "plugins/core/contract/attention.h"

namespace stof {
namespace cpu {

// The keys of a sequence that may be read.
inline int64_t EndOfKeys(const AttentionArgs& args, int64_t b) {
  return args.key_ends == nullptr ? args.T : args.key_ends[b];
}

// Whether the queries of a call are so few that the keys' way from memory counts.
bool HasFewQueries(const AttentionArgs& args);

// A call as the kernels see it, and what that refers to. args must outlive it.
class AttentionPlan {
 public:
  AttentionPlan(const AttentionArgs& args, const CpuAttentionConfig& config);
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  AttentionProblem* problem() { return &problem_; }
  int64_t Items() const { return problem_.few_queries ? split_items_ : args_.B * args_.H * problem_.tile_rows; }

 private:
  // Whether the mask lists the key tiles of rows.
  bool HasRuns() const;
  // And those of a sequence are the same for all of its heads.
  bool HasCommonRuns() const { return HasRuns() && !args_.elements->by_head; }
  // Calls visit(run) for the key tiles that rows of one head may attend.
  template <typename Visit>
  void ForEachRun(int64_t b, int64_t h, int64_t row0, int64_t rows, const Visit& visit);
  // The key tiles that a sequence's queries may attend: all that exist where that is not known cheaply.
  void FindTiles(int64_t b, SequenceTiles* sequence);
  // Heads whose rows go together: as many of a group as have the same mask, and few enough for a worker's memory.
  int64_t PackedHeads() const;
  void PlanFewQueries();
  // Cuts the `count` tiles of a sequence into splits of equal length; first_item is their place in split_begins_.
  void Split(int64_t b, int64_t count, int64_t length);
  void PlanTileRows();
  // The most key tiles of a tile row; where runs are listed, of some of them.
  int64_t MostTiles();

  const AttentionArgs& args_;
  AttentionProblem problem_;
  std::vector<KeyTileRun> runs_;  // scratch
  std::vector<SequenceTiles> sequences_;
  std::vector<int32_t> split_begins_;
  int64_t split_items_ = 0;
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_PLAN_H_
