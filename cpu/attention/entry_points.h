// SPDX-License-Identifier: Apache-2.0
// The entry points of attention for one instruction set, and one type of packed keys and values (packed_type.h).
#ifndef STOF_CPU_ATTENTION_ENTRY_POINTS_H_
#define STOF_CPU_ATTENTION_ENTRY_POINTS_H_

#include "cpu/attention/attention_worker.h"
#include "cpu/attention/choose.h"
#include "cpu/attention/output.h"
#include "cpu/attention/pooling.h"
#include "cpu/attention/relative.h"
#include "cpu/attention/scores.h"
#include "cpu/attention/skip.h"
#include "cpu/attention/tile_order.h"
#include "cpu/attention/weights.h"

namespace stof {
namespace cpu {
namespace {

size_t ScratchBytes(const AttentionProblem& problem) { return Scratch(problem, nullptr).size; }

void Prepare(const AttentionProblem& problem, void* memory) {
  const Scratch scratch(problem, memory);
  *scratch.mean_of = -1;
  if (CountsPairs(problem)) scratch.skip_counts[0] = scratch.skip_counts[1] = 0;
  if (scratch.chosen_of != nullptr) *scratch.chosen_of = -1;
  if (scratch.kept_of != nullptr) *scratch.kept_of = -1;
  if (scratch.tables_of != nullptr) *scratch.tables_of = -1;
  for (int64_t i = 0; i < problem.ring_tiles; ++i) scratch.ring_of[i] = -1;
  for (int64_t i = 0; i < problem.element_slots; ++i) scratch.elements_of[i] = -1;
}

void Pack(const AttentionProblem& problem, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& args = *problem.args;
  const Scratch scratch(problem, memory);
  // Heads are innermost, since exporters leave them side by side: a page of keys is met once, not once per head.
  int64_t b = 0;
  for (int64_t i = first; i < last; ++i) {
    const int64_t g = i % args.shape.G;
    while (problem.sequences[b].first_panel + problem.sequences[b].panels <= i / args.shape.G) ++b;
    const SequenceTiles& sequence = problem.sequences[b];
    const int64_t packed = i / args.shape.G - sequence.first_panel, end = EndOfKeys(args, b);
    const int64_t panel = sequence.first * (problem.n / kPanel) + packed;
    const int64_t at = sequence.first_panel * args.shape.G + g * sequence.panels + packed;
    const int64_t item_size = SizeOf(KvType(args.shape)), count = Min(kPanel, end - panel * kPanel);
    const int64_t tile = panel * kPanel / problem.n, row = panel * kPanel % problem.n;
    const char* keys = static_cast<const char*>(args.key.data) +
                       item_size * (BeginOfKeys(args, args.key.stride, b) + g * args.key.stride.h);
    const Rows key_rows = RowsOfTile(problem, keys, args.key.stride.s, problem.column_keys, args.shape.D, b, g, tile);
    PackKeys(key_rows.From(row), count, args, scratch,
             static_cast<Packed*>(problem.packed_keys) + at * PackedKeySize(args.shape.D) * kPanel);
    if (!problem.pack_values) continue;
    const char* values = static_cast<const char*>(args.value.data) +
                         item_size * (BeginOfKeys(args, args.value.stride, b) + g * args.value.stride.h);
    const Rows value_rows =
        RowsOfTile(problem, values, args.value.stride.s, problem.column_values, args.shape.Dv, b, g, tile);
    PackValues(value_rows.From(row), count, args, scratch,
               static_cast<Packed*>(problem.packed_values) + at * kPanel * scratch.ldo);
  }
}

void PackPooledKeys(const AttentionProblem& problem, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& args = *problem.args;
  const Scratch scratch(problem, memory);
  int64_t b = 0;
  for (int64_t i = first; i < last; ++i) {  // heads are innermost, as in Pack
    const int64_t g = i % args.shape.G, panel = i / args.shape.G;
    while (problem.sequences[b].first_pooled_panel + problem.sequences[b].pooled_panels <= panel) ++b;
    const SequenceTiles& sequence = problem.sequences[b];
    const int64_t packed = panel - sequence.first_pooled_panel;
    const int64_t at = sequence.first_pooled_panel * args.shape.G + g * sequence.pooled_panels + packed;
    const int64_t key0 = sequence.first * problem.n + packed * kPanel * kPooledKeys;
    const char* const keys =
        static_cast<const char*>(args.key.data) +
        SizeOf(KvType(args.shape)) * (BeginOfKeys(args, args.key.stride, b) + g * args.key.stride.h);
    const uint32_t found = PackPooledPanel(problem, RowsOfHead(args, keys, args.key.stride.s, b), b, g, key0, scratch,
                                           problem.pooled_keys + at * args.shape.D * kPanel);
    if (g == 0) problem.pooled_keys_found[panel] = found;
  }
}

void PackTables(const AttentionProblem& problem, int64_t first, int64_t last, void* memory) {
  const Scratch scratch(problem, memory);
  const RelativeTables& tables = *problem.relative;
  const PackedTable* const all[] = {&tables.key[0], &tables.key[1], &tables.query, &tables.value};
  for (int64_t i = first; i < last; ++i) {
    int64_t at = i;
    for (const PackedTable* const table : all) {
      const int64_t panels = table->rows / kPanel, head = panels == 0 ? 0 : at / panels;
      if (head < table->SharedHeads()) {
        PackTablePanel(problem, *table, head, at % panels, table->data + head * table->stride_h,
                       table->row_bias == nullptr ? nullptr : table->row_bias + head * table->RowBiasStride(),
                       scratch.table_rows);
        break;
      }
      at -= table->SharedHeads() * panels;
    }
  }
}

void AttendTileRow(const AttentionProblem& problem, int64_t item, int64_t next, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t heads = args.shape.H * problem.tile_rows, rows = problem.tile_rows;
  const ConfiguredTiles tiles;
  AttentionWorker<false> worker(problem, memory);
  const int64_t b = item / heads, row0 = item % rows * problem.m;
  worker.Begin(b, item / rows % args.shape.H, 1, row0, Min(problem.m, EndOfQueries(args, b) - row0));
  if (next >= 0) worker.QueuePrefetch(next / heads, next / rows % args.shape.H, next % rows * problem.m);
  worker.AttendTiles(0, problem.key_tiles, false);
  worker.Finish();
}

float* PartialOf(const AttentionProblem& problem, int64_t row, int64_t split) {
  return problem.partial + (row * problem.most_splits + split) * problem.partial_stride;
}

template <bool kInPlace>
void AttendSplitOf(const AttentionProblem& problem, int64_t kv_head, int64_t split, void* memory) {
  const AttentionArgs& args = *problem.args;
  const KvSplits& splits = problem.kv_splits[kv_head];
  const int64_t b = kv_head / args.shape.G, g = kv_head % args.shape.G, group = args.shape.H / args.shape.G,
                heads = problem.packed_heads;
  const ConfiguredTiles tiles;
  AttentionWorker<kInPlace> worker(problem, memory);
  for (int64_t h = g * group; h < (g + 1) * group; h += heads) {
    worker.Begin(b, h, heads, 0, args.shape.S);
    worker.AttendTiles(splits.begin[split], splits.begin[split + 1], false);
    if (splits.count == 1) {
      worker.Finish();
      continue;
    }
    for (int64_t r = 0; r < heads * args.shape.S; ++r) {
      worker.StorePartial(static_cast<int>(r), PartialOf(problem, (b * args.shape.H + h) * args.shape.S + r, split));
    }
  }
}

void AttendSplit(const AttentionProblem& problem, int64_t item, void* memory) {
  // The last KV head whose items begin at or before this one.
  int64_t at = 0, end = problem.args->shape.B * problem.args->shape.G;
  while (end - at > 1) {
    const int64_t middle = (at + end) / 2;
    (problem.kv_splits[middle].first_item <= item ? at : end) = middle;
  }
  item -= problem.kv_splits[at].first_item;
  if (problem.args->kv.pages.given() && problem.run_lists == 1) {
    // Heads lie side by side in a row of a page, and have equally many splits: items of the same keys follow each
    // other.
    const int64_t heads = problem.args->shape.G, splits = problem.kv_splits[at].count;
    const int64_t of_sequence = at % heads * splits + item;
    at = at / heads * heads + of_sequence % heads;
    item = of_sequence / heads;
  }
  // Keys in place are read from memory faster than fp32 computes: they have no kernel in bf16.
  if constexpr (!kRoundsToBf16) {
    if (problem.in_place) return AttendSplitOf<true>(problem, at, item, memory);
  }
  AttendSplitOf<false>(problem, at, item, memory);
}

template <bool kInPlace>
void CombineSplitsOf(const AttentionProblem& problem, int64_t row, int64_t splits, void* memory) {
  const AttentionArgs& args = *problem.args;
  const ConfiguredTiles tiles;  // a fully masked row may attend all keys
  AttentionWorker<kInPlace> worker(problem, memory);
  worker.Begin(row / args.shape.S / args.shape.H, row / args.shape.S % args.shape.H, 1, row % args.shape.S, 1);
  worker.CombinePartials(PartialOf(problem, row, 0), splits, problem.partial_stride);
  worker.Finish();
}

void CombineSplits(const AttentionProblem& problem, int64_t row, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t splits = problem.kv_splits[row / args.shape.S / (args.shape.H / args.shape.G)].count;
  if (splits == 1) return;
  if constexpr (!kRoundsToBf16) {
    if (problem.in_place) return CombineSplitsOf<true>(problem, row, splits, memory);
  }
  CombineSplitsOf<false>(problem, row, splits, memory);
}

const uint64_t* SkippedPairs(const AttentionProblem& problem, void* memory) {
  return Scratch(problem, memory).skip_counts;
}

constexpr AttentionKernels kAttentionKernels = {
    ScratchBytes, Prepare, Pack, PackPooledKeys, PackTables, AttendTileRow, AttendSplit, CombineSplits, SkippedPairs,
};

}  // namespace

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_ENTRY_POINTS_H_
