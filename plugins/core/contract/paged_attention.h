// SPDX-License-Identifier: Apache-2.0
// Attention over a paged KV cache: the step in front of attention, and what a device does around it.
#ifndef STOF_PLUGINS_CORE_CONTRACT_PAGED_ATTENTION_H_
#define STOF_PLUGINS_CORE_CONTRACT_PAGED_ATTENTION_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/cached_attention.h"

namespace stof {

// Keys that no query attends are read where they share a tile of a kernel with attended ones: no tile begins earlier
// than the first attended key, rounded down to this.
constexpr int64_t kMostTileKeys = 128;

// The new tokens of B sequences, side by side, and the cache that they are appended to. On a device all pointers are
// device addresses.
struct PagedAppendArgs {
  // The tokens as those of one sequence: B is 1, S is N, and [rows, G, D] of present_key and present_value are all
  // rows of the cache, `capacity` of them. Lengths, past, window, staging and results are not used, but for
  // rotated_query: [N, H, D] on the CPU, [B, H, most_queries, D] on a device.
  CacheAppendArgs tokens;
  int64_t B = 0;
  const int32_t* cumulative = nullptr;    // [B + 1]
  const int32_t* past = nullptr;          // [B]
  const int32_t* slot_mapping = nullptr;  // [N]; nullptr: the block table gives the rows
  KeyPages pages;
  int64_t window_left = -1;  // the keys q - window_left to q are all that a query attends; -1: any key up to q

  // ---- devices alone ----
  int64_t most_queries = 0, most_keys = 0;  // of a sequence; others are illegal
  const void* from_key = nullptr;           // the cache before the step, copied where it is another buffer
  const void* from_value = nullptr;
  int32_t* first_rows = nullptr;  // [B]: past, or where that is illegal a row that keeps all accesses in bounds
  int32_t* key_ends = nullptr;    // [B]: keys after the step, 0 where the sequence is illegal
  int32_t* is_invalid = nullptr;  // [B]: the outputs of the sequence must be NaN

  // The most keys of a sequence.
  int64_t rows_of_table() const { return std::min(pages.columns << pages.shift, AttentionLimits::kMostLength); }
  // The first key of a sequence that may be read.
  int64_t FirstKey(int64_t past_keys) const {
    if (window_left < 0) return 0;
    return std::max<int64_t>(0, past_keys - window_left) / kMostTileKeys * kMostTileKeys;
  }
};

// ---- CPU ----
// What the CPU knows of a step before it runs.
struct PagedStep {
  std::vector<int32_t> key_ends;   // [B]
  std::vector<int64_t> slots;      // [N]: the row of the cache; -1: not stored
  std::vector<int64_t> positions;  // [N]
  // [B, columns]: the block table with 0 for entries that no kernel reads.
  std::vector<int32_t> table;
  int64_t columns = 0;
};
// Checks lengths, block table, slots and positions, and fills *step. An error names the input and the value.
Status CheckPagedStep(const PagedAppendArgs& args, PagedStep* step);
// Fills the cache and rotated_query.
Status CpuAppendToPages(const PagedAppendArgs& args, const PagedStep& step, const Parallel& parallel);

// ---- CUDA ----
// Copies the rows of B sequences from pages to [B, G, T, D], dense. Rows that no query attends become zeros.
struct PagedGatherArgs {
  int64_t B = 0, G = 0, T = 0, D = 0;
  DType dtype = DType::kF32;
  KeyPages pages;
  const void* cache[2] = {nullptr, nullptr};  // keys, values: [rows, G, D]
  void* to[2] = {nullptr, nullptr};
  const int32_t* first_rows = nullptr;  // [B]
  const int32_t* key_ends = nullptr;    // [B]
  int64_t window_left = -1;
};

struct PagedAttentionBackend {
  // Copies counts to the host and waits for the stream, which is not being captured.
  Status (*read_counts)(const int32_t* from, int64_t count, int32_t* to, const RunContext& context) = nullptr;
  // Queues what CheckPagedStep and CpuAppendToPages do, and the copy of the caches where that is needed.
  Status (*append)(const PagedAppendArgs& args, const RunContext& context) = nullptr;
  Status (*gather)(const PagedGatherArgs& args, const RunContext& context) = nullptr;
  // Copies the rows of [B, most_queries, H * D] to the tokens that they belong to: [N, H * D].
  Status (*unpad)(const PagedAppendArgs& args, const void* padded, void* output, const RunContext& context) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_PAGED_ATTENTION_H_
