// SPDX-License-Identifier: Apache-2.0
// StofPagedAttention: docs/reference/paged-attention.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_

#include <cstdint>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/paged_attention.h"
#include "plugins/core/mask/cached_mask.h"

namespace stof {

// The inputs by index: those of PagedAttention, and the tables of the mask.
namespace paged_input {
constexpr int kQuery = 0, kKey = 1, kValue = 2, kKeyCache = 3, kValueCache = 4, kCumulative = 5, kPast = 6,
              kBlockTable = 7, kCos = 8, kSin = 9, kSlots = 10, kSink = 11, kQueryNorm = 12, kKeyNorm = 13,
              kKeyScale = 14, kValueScale = 15, kMetadata = 16, kTables = 17;
constexpr int kMostTables = 4;
constexpr int kCount = kTables + kMostTables;
constexpr const char* kNames[kCount] = {
    "query",         "key",           "value",     "key_cache", "value_cache",        "cumulative_sequence_length",
    "past_seqlens",  "block_table",   "cos_cache", "sin_cache", "slot_mapping",       "head_sink",
    "q_norm_weight", "k_norm_weight", "k_scale",   "v_scale",   "attention_metadata", "table0",
    "table1",        "table2",        "table3"};
}  // namespace paged_input

// What one run is given: the arguments of the append step, and those parts of attention over the pages that do not
// depend on it. On the CPU attention is run for sequences of equal length at a time, on a device for all.
struct PagedRun {
  PagedAppendArgs append;
  ScoreArgs scores;
  void* output = nullptr;  // [N, H * D]
  bool allow_bf16 = false;
  const char* kernel = "";
  bool has_query_copy = false;  // rotary embedding or norm: queries are not read in place
  // Bounds of attention_metadata, 0: unknown.
  int64_t most_queries = 0, most_keys = 0;
};

Status RunPagedOnCpu(const CachedMask& mask, const RunContext& context, PagedRun* run);
// Takes from the context what a run on the CPU takes, and does nothing else. Where lengths, block table or slots have
// no data, each sequence gets as many of the tokens, and a full row of the table.
Status PlanPagedOnCpu(const CachedMask& mask, const RunContext& context, PagedRun* run);
// The mask's tables are constant.
Status RunPagedOnCuda(const CachedMask& mask, const CudaBackend& backend, const RunContext& context, PagedRun* run);

const OpDescription* PagedAttentionDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_PAGED_ATTENTION_PAGED_ATTENTION_H_
