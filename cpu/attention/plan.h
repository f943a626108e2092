// SPDX-License-Identifier: Apache-2.0
// Plans a call of attention on the CPU: the key tiles of each sequence, KV splits where queries are few, and the
// packing of keys.
#ifndef STOF_CPU_ATTENTION_PLAN_H_
#define STOF_CPU_ATTENTION_PLAN_H_

#include <cstdint>
#include <vector>

#include "cpu/attention/attention.h"
#include "plugins/core/contract/attention.h"

namespace stof {
namespace cpu {

// Whether a call has so few queries that it is bound by reading keys from memory.
bool HasFewQueries(const AttentionArgs& args);

// The AttentionProblem of a call, and the arrays that it points to. args must outlive it.
class AttentionPlan {
 public:
  // Results do not depend on the number of threads. has_bf16: matmuls may be in bf16, and there are kernels.
  AttentionPlan(const AttentionArgs& args, const CpuAttentionConfig& config, int threads, bool has_bf16);
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  AttentionProblem* problem() { return &problem_; }
  RelativeTables* relative() { return &relative_; }  // of problem()->relative
  int64_t Items() const { return problem_.few_queries ? split_items_ : tile_items_; }

 private:
  // Whether the mask can list the key tiles of rows as runs.
  bool HasRuns() const;
  // Whether it does, and all heads of a group have the same runs.
  bool HasGroupRuns() const;
  // Whether it does, and all heads of a sequence have the same runs.
  bool HasCommonRuns() const { return HasRuns() && !args_.mask.fixed.elements()->by_head; }
  // Calls visit(run) for the key tiles that rows of one head may attend.
  template <typename Visit>
  void ForEachRun(int64_t b, int64_t h, int64_t row0, int64_t rows, const Visit& visit);
  // Finds the key tiles that a sequence's queries may attend: all of its tiles where no common runs bound them.
  void FindTiles(int64_t b, SequenceTiles* sequence);
  // How many heads of a group share an item (GQA packing): they have one mask, and fit a worker's memory.
  int64_t PackedHeads() const;
  // Whether kernels choose key blocks: query blocks are of whole tile rows, key blocks are tiles.
  bool CanChooseBlocks() const;
  void PlanFewQueries();
  // Few queries: lists the runs of each KV head, or of each sequence where all heads have the same.
  void ListRuns();
  // Divides the tiles of a KV head into `count` splits of equal length.
  void Split(const KeyTileRun* runs, int64_t run_count, int64_t tiles, int64_t count);
  void PlanTileRows();
  // Has keys and values packed in bf16.
  void RoundToBf16();
  void PlanRelativeTables(int threads);
  // The most key tiles of a tile row. Where the mask lists runs, only a sample of the rows is counted.
  int64_t MostTiles();

  const AttentionArgs& args_;
  const bool has_bf16_;
  AttentionProblem problem_;
  RelativeTables relative_;
  std::vector<KeyTileRun> runs_;  // scratch
  std::vector<SequenceTiles> sequences_;
  std::vector<KvSplits> kv_splits_;
  std::vector<KeyTileRun> group_runs_;    // few queries
  std::vector<int64_t> group_run_begin_;  // likewise: [B * lists + 1], indices into group_runs_
  std::vector<int32_t> split_begins_;
  int64_t split_items_ = 0;
  int64_t tile_items_ = 0;
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_PLAN_H_
