// SPDX-License-Identifier: Apache-2.0
// Between the dispatcher (attention.cc) and the kernels of each instruction set (attention_kernels.cc).
#ifndef STOF_CPU_ATTENTION_ATTENTION_H_
#define STOF_CPU_ATTENTION_ATTENTION_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/chosen_blocks.h"

namespace stof {
namespace cpu {

constexpr int kPanel = 16;         // keys that are packed side by side, one 64-byte line per element of the head
constexpr int kStrip = 6;          // query rows of a register block, as m_r of a BLIS microkernel
constexpr int kInPlaceStrip = 4;   // query rows that share a pass over the keys of a tile where these are read in place
constexpr int kMaxTileKeys = 256;  // n
constexpr int kBf16HeadUnit = 32;  // heads of packed keys in bf16 are padded to a multiple: the depth of a tile of AMX
constexpr int kKeyBlock = 64;      // keys whose products with a relative table are computed at a time

// The number of keys of a sequence. Later rows of a cache are not read.
STOF_ALWAYS_INLINE int64_t EndOfKeys(const AttentionArgs& args, int64_t b) {
  return args.kv.key_ends == nullptr ? args.shape.T : args.kv.key_ends[b];
}

// The number of queries of a sequence.
STOF_ALWAYS_INLINE int64_t EndOfQueries(const AttentionArgs& args, int64_t b) {
  const PackedSequences& sequences = args.sequences;
  return sequences.has_queries ? sequences.starts[b + 1] - sequences.starts[b] : args.shape.S;
}

// Elements in front of row 0 of a sequence: of key and value, of query and output.
STOF_ALWAYS_INLINE int64_t BeginOfKeys(const AttentionArgs& args, const Strides& stride, int64_t b) {
  return args.sequences.given() ? args.sequences.starts[b] * stride.s : b * stride.b;
}
STOF_ALWAYS_INLINE int64_t BeginOfQueries(const AttentionArgs& args, const Strides& stride, int64_t b) {
  return args.sequences.has_queries ? args.sequences.starts[b] * stride.s : b * stride.b;
}

// The arrays of a BlockMask as kernels read them: they do not call functions of std::vector.
struct BlockMaskArrays {
  int32_t rows = 0, layout_b = 1, layout_h = 1;
  const int32_t *layout = nullptr, *row_ptr = nullptr, *full_begin = nullptr, *key_tile = nullptr, *bits_id = nullptr;
  const uint32_t* bits = nullptr;
};

// The key tiles that the queries of one sequence may attend: all lie in [first, last). Each of its KV heads has so many
// packed panels; those of the sequences before it are first_panel of each head.
struct SequenceTiles {
  int64_t first = 0, last = 0;
  int64_t first_panel = 0, panels = 0;
  int64_t first_pooled_panel = 0, pooled_panels = 0;  // likewise of the pooled keys, where blocks are chosen
};

// Choose blocks: pooled keys and queries of a block, and what becomes of a key block.
constexpr int64_t kPooledKeysOfBlock = kBlockKeys / kPooledKeys, kPooledQueriesOfBlock = kBlockQueries / kPooledQueries;
enum BlockChoice : uint8_t { kNoPair, kLeftOut, kChosen };

// Few queries: the KV splits of one KV head of a sequence, an item each.
struct KvSplits {
  int64_t first_item = 0;
  int64_t count = 1;
  const int32_t* begin = nullptr;  // [count + 1], the first tile of each split
};

// A relative table as kernels read it, in fp32: the rows [first, first + rows) that pairs name, counted as
// RelativeRows does. They are whole panels of kPanel rows.
struct PackedTable {
  const RelativeTable* table = nullptr;  // nullptr: none
  bool is_panels = false;  // [heads, panels, D, kPanel], as packed keys; else [heads, rows, ld], times scale
  bool is_value = false;   // not times scale, and ld is Dv rounded up to kPanel
  int64_t heads = 1;       // 1: all heads share one
  int64_t first = 0, rows = 0;
  int64_t ld = 0, stride_h = 0;
  int64_t capacity = 0;  // of panels: the panels of a ring of products, a power of two
  float* data = nullptr;
  float* row_bias = nullptr;  // [heads, RowBiasStride], times scale; nullptr: none
  // Each worker packs the table of the head that it attends; `data` and `row_bias` are not set.
  bool is_own = false;

  // The products of all keys of a head are kept for its other tile rows: [key blocks, KeptStride, kKeyBlock] of each
  // worker.
  bool keeps_products = false;

  // Strips of rows may end behind the table.
  STOF_ALWAYS_INLINE int64_t KeptStride() const { return rows + kStrip; }
  STOF_ALWAYS_INLINE int64_t RowBiasStride() const {
    return table != nullptr && table->columns > ld ? rows + kStrip : 0;
  }
  // Heads that are packed before the first item.
  STOF_ALWAYS_INLINE int64_t SharedHeads() const { return table == nullptr || is_own ? 0 : heads; }
  STOF_ALWAYS_INLINE int64_t WeightStride() const { return rows + kPanel; }
};

struct RelativeTables {
  PackedTable key[2], query, value;
};

// One call. Filled by the dispatcher, read by the kernels.
struct AttentionProblem {
  const AttentionArgs* args = nullptr;
  BlockMaskArrays mask;  // of StaticMask::blocks
  int m = 0, n = 0;
  int64_t tile_rows = 0;                     // ceil(S / m); short packed sequences have fewer
  int64_t key_tiles = 0;                     // ceil(T / n)
  int64_t panels = 0;                        // of the packed keys of all sequences, for each KV head
  bool few_queries = false;                  // the path of KV splits and GQA packing
  bool in_place = false;                     // few queries: keys are read in place, not packed
  int64_t packed_heads = 1;                  // few queries: query heads of a group that share an item
  const SequenceTiles* sequences = nullptr;  // [B]
  const KvSplits* kv_splits = nullptr;       // few queries: [B, G]
  // Few queries: the runs of key tiles of list l of sequence b are [run_begin[i], run_begin[i + 1]) of `runs`, i = b *
  // run_lists + l. A list is of one KV head, or of all where run_lists is 1. nullptr: the mask lists none, or heads of
  // a group differ.
  const KeyTileRun* runs = nullptr;
  const int64_t* run_begin = nullptr;
  int64_t run_lists = 1;
  const uint32_t* pad_bits = nullptr;  // [B, key_tiles, n / 32], 0 beyond T; nullptr: no key is padded
  int64_t ring_tiles = 0;              // > 0: each worker packs the key tiles it meets into a ring buffer of so many
  int64_t element_slots = 0;           // tiles of StaticMask::elements that each worker keeps
  bool has_short_pages = false;        // the keys of a tile may lie on several pages: they are never read in place
  bool pack_values = false;            // values are not read in place: another type, or rows that are not dense
  bool rounds_to_bf16 = false;    // matmuls in bf16: keys and values are packed as cpu/attention/bf16_block.h has it
  void* packed_keys = nullptr;    // ring_tiles = 0: of each sequence [G, its panels, D, kPanel]
  void* packed_values = nullptr;  // likewise, pack_values: [G, panels, kPanel, Dv rounded up to kPanel]
  // Key blocks are chosen: tiles are blocks of keys, and tile rows divide blocks of queries.
  bool chooses_blocks = false;
  int64_t pooled_panels = 0;              // of all sequences, for each KV head
  float* pooled_keys = nullptr;           // of each sequence [G, its panels, D, kPanel]
  uint32_t* pooled_keys_found = nullptr;  // [pooled_panels], bit j: pooled key j of the panel has a key
  // The first key tiles hold gathered columns (KvArgs::columns): [B, G, column_tiles * n, D or Dv], dense.
  int64_t column_tiles = 0;
  const char* column_keys = nullptr;
  const char* column_values = nullptr;
  const RelativeTables* relative = nullptr;  // nullptr: none; never with few queries
  int64_t most_splits = 1;                   // few queries: of a KV head
  float* partial = nullptr;  // most_splits > 1: [B, H, S, most_splits, partial_stride], max, sum, output
  int64_t partial_stride = 0;
};

// Whether workers count pairs, as SkipCounts.
STOF_ALWAYS_INLINE bool CountsPairs(const AttentionProblem& problem) {
  return problem.args->scores.skip_threshold > 0.0f || problem.chooses_blocks;
}

// Bytes of a packed key and a packed value.
STOF_ALWAYS_INLINE int64_t PackedKeyBytes(const AttentionProblem& problem) {
  const int64_t size = problem.args->shape.D;
  return problem.rounds_to_bf16 ? (size + kBf16HeadUnit - 1) / kBf16HeadUnit * kBf16HeadUnit * 2 : size * 4;
}
STOF_ALWAYS_INLINE int64_t PackedValueBytes(const AttentionProblem& problem) {
  const int64_t size = (problem.args->shape.Dv + kPanel - 1) / kPanel * kPanel;
  return problem.rounds_to_bf16 ? size * 2 : size * 4;
}

STOF_ALWAYS_INLINE int64_t CountKeyBlocks(const AttentionProblem& problem) {
  return problem.key_tiles * ((problem.n + kKeyBlock - 1) / kKeyBlock);
}

struct AttentionKernels {
  size_t (*scratch_bytes)(const AttentionProblem& problem);         // of one worker, which gets it 64-byte aligned
  void (*prepare)(const AttentionProblem& problem, void* scratch);  // before a worker's first item
  // Packs panels [first, last) of the G * panels there are into packed_keys and packed_values.
  void (*pack)(const AttentionProblem& problem, int64_t first, int64_t last, void* scratch);
  // Makes panels [first, last) of the G * pooled_panels there are, in pooled_keys.
  void (*pack_pooled_keys)(const AttentionProblem& problem, int64_t first, int64_t last, void* scratch);
  // Packs panels [first, last) of the relative tables, counted over tables and heads.
  void (*pack_tables)(const AttentionProblem& problem, int64_t first, int64_t last, void* scratch);
  // Attends one tile row, item of B * H * tile_rows, which exists; next is the worker's next one, or -1.
  void (*attend_tile_row)(const AttentionProblem& problem, int64_t item, int64_t next, void* scratch);
  // Few queries: attends one KV split of the heads of one item.
  void (*attend_split)(const AttentionProblem& problem, int64_t item, void* scratch);
  // Few queries, splits > 1: combines the partial results of one of B * H * S rows.
  void (*combine_splits)(const AttentionProblem& problem, int64_t row, void* scratch);
  // CountsPairs: the pairs that a worker has scored and skipped since `prepare`.
  const uint64_t* (*skip_counts)(const AttentionProblem& problem, void* scratch);
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_ATTENTION_H_
