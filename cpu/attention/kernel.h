// SPDX-License-Identifier: Apache-2.0
// The entry points of one instruction set.
#ifndef STOF_CPU_ATTENTION_KERNEL_H_
#define STOF_CPU_ATTENTION_KERNEL_H_

#include "cpu/attention/scores.h"
#include "cpu/attention/tile_worker.h"
#include "cpu/attention/weights.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::attention {

size_t ScratchBytes(const AttentionProblem& problem) { return Scratch(problem, nullptr).size; }

void Prepare(const AttentionProblem& problem, void* memory) {
  const Scratch scratch(problem, memory);
  *scratch.mean_of = -1;
  for (int64_t i = 0; i < problem.ring_tiles; ++i) scratch.ring_of[i] = -1;
  for (int64_t i = 0; i < problem.element_slots; ++i) scratch.elements_of[i] = -1;
}

void Pack(const AttentionProblem& problem, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& args = *problem.args;
  const Scratch scratch(problem, memory);
  // Heads are innermost, since exporters leave them side by side: a page of keys is met once, not once per head.
  for (int64_t i = first; i < last; ++i) {
    const int64_t g = i % args.G, b = i / args.G / problem.panels;
    const int64_t packed = i / args.G % problem.panels, end = EndOfKeys(args, b);
    const int64_t panel = problem.sequences[b].first * (problem.n / kPanel) + packed;
    if (panel * kPanel >= Min(end, problem.sequences[b].last * problem.n)) continue;
    const int64_t at = (b * args.G + g) * problem.panels + packed;
    const char* keys =
        static_cast<const char*>(args.key) + SizeOf(KvType(args)) * (b * args.key_stride.b + g * args.key_stride.h);
    PackKeys(keys, panel, end, args, scratch, problem.packed_keys + at * args.D * kPanel);
    if (!problem.pack_values) continue;
    const char* values = static_cast<const char*>(args.value) +
                         SizeOf(KvType(args)) * (b * args.value_stride.b + g * args.value_stride.h);
    CopyValues(values, panel * kPanel, Min(kPanel, end - panel * kPanel), args, scratch.ldo,
               problem.packed_values + at * kPanel * scratch.ldo);
  }
}

void AttendTileRow(const AttentionProblem& problem, int64_t item, int64_t next, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t heads = args.H * problem.tile_rows, rows = problem.tile_rows;
  Worker<false> worker(problem, memory);
  const int64_t row0 = item % rows * problem.m;
  worker.Begin(item / heads, item / rows % args.H, 1, row0, Min(problem.m, args.S - row0));
  if (next >= 0) worker.QueuePrefetch(next / heads, next / rows % args.H, next % rows * problem.m);
  worker.AttendTiles(0, problem.key_tiles, false);
  worker.Finish();
}

float* PartialOf(const AttentionProblem& problem, int64_t row, int64_t split) {
  return problem.partial + (row * problem.most_splits + split) * problem.partial_stride;
}

template <bool kInPlace>
void AttendSplitOf(const AttentionProblem& problem, int64_t b, int64_t item, void* memory) {
  const AttentionArgs& args = *problem.args;
  const SequenceTiles& sequence = problem.sequences[b];
  const int64_t split = item % sequence.splits, heads = problem.packed_heads;
  const int64_t g = item / sequence.splits, group = args.H / args.G;
  Worker<kInPlace> worker(problem, memory);
  for (int64_t h = g * group; h < (g + 1) * group; h += heads) {
    worker.Begin(b, h, heads, 0, args.S);
    worker.AttendTiles(sequence.split_begin[split], sequence.split_begin[split + 1], false);
    if (sequence.splits == 1) {
      worker.Finish();
      continue;
    }
    for (int64_t r = 0; r < heads * args.S; ++r) {
      worker.StorePartial(static_cast<int>(r), PartialOf(problem, (b * args.H + h) * args.S + r, split));
    }
  }
}

void AttendSplit(const AttentionProblem& problem, int64_t item, void* memory) {
  int64_t b = 0, end = problem.args->B;  // the last sequence whose items begin at or before this one
  while (end - b > 1) {
    const int64_t middle = (b + end) / 2;
    (problem.sequences[middle].first_item <= item ? b : end) = middle;
  }
  item -= problem.sequences[b].first_item;
  problem.in_place ? AttendSplitOf<true>(problem, b, item, memory) : AttendSplitOf<false>(problem, b, item, memory);
}

template <bool kInPlace>
void CombineSplitsOf(const AttentionProblem& problem, int64_t row, int64_t splits, void* memory) {
  const AttentionArgs& args = *problem.args;
  Worker<kInPlace> worker(problem, memory);
  worker.Begin(row / args.S / args.H, row / args.S % args.H, 1, row % args.S, 1);
  worker.CombinePartials(PartialOf(problem, row, 0), splits, problem.partial_stride);
  worker.Finish();
}

void CombineSplits(const AttentionProblem& problem, int64_t row, void* memory) {
  const int64_t splits = problem.sequences[row / problem.args->S / problem.args->H].splits;
  if (splits == 1) return;
  problem.in_place ? CombineSplitsOf<true>(problem, row, splits, memory)
                   : CombineSplitsOf<false>(problem, row, splits, memory);
}

}  // namespace STOF_ISA::attention
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_KERNEL_H_
