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
  FillTailWords(problem, scratch.words_tail);
}

void Pack(const AttentionProblem& problem, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& args = *problem.args;
  const Scratch scratch(problem, memory);
  // Heads are innermost, since exporters leave them side by side: a page of keys is met once, not once per head.
  for (int64_t i = first; i < last; ++i) {
    const int64_t g = i % args.G, panel = i / args.G % problem.panels, b = i / args.G / problem.panels;
    const int64_t at = (b * args.G + g) * problem.panels + panel;
    const char* keys =
        static_cast<const char*>(args.key) + SizeOf(args.dtype) * (b * args.key_stride.b + g * args.key_stride.h);
    const int64_t end = KeyEnd(args, b);
    PackKeys(keys, panel, end, args, scratch, problem.packed_keys + at * args.D * kPanel);
    if (!problem.pack_values) continue;
    const char* values =
        static_cast<const char*>(args.value) + SizeOf(args.dtype) * (b * args.value_stride.b + g * args.value_stride.h);
    CopyValues(values, panel * kPanel, kPanel, end, args, scratch.ldo,
               problem.packed_values + at * kPanel * scratch.ldo);
  }
}

void AttendTileRow(const AttentionProblem& problem, int64_t item, int64_t next, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t heads = args.H * problem.tile_rows, rows = problem.tile_rows;
  Worker<false> worker(problem, memory);
  const int64_t row0 = item % rows * problem.m;
  worker.Begin(item / heads, item / rows % args.H, row0, Min(problem.m, args.S - row0));
  if (next >= 0) worker.QueuePrefetch(next / heads, next / rows % args.H, next % rows * problem.m);
  worker.AttendTiles(0, problem.key_tiles, false);
  worker.Finish();
}

float* PartialOf(const AttentionProblem& problem, int64_t row, int64_t split) {
  return problem.partial + (row * problem.splits + split) * problem.partial_stride;
}

void AttendSplit(const AttentionProblem& problem, int64_t item, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t split = item % problem.splits;
  const int64_t g = item / problem.splits % args.G, b = item / problem.splits / args.G;
  const int64_t heads = args.H / args.G, first = split * problem.split_tiles;
  Worker<true> worker(problem, memory);
  for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
    worker.Begin(b, h, 0, args.S);
    worker.AttendTiles(first, Min(first + problem.split_tiles, problem.key_tiles), false);
    if (problem.splits == 1) {
      worker.Finish();
      continue;
    }
    for (int64_t r = 0; r < args.S; ++r) {
      worker.StorePartial(static_cast<int>(r), PartialOf(problem, (b * args.H + h) * args.S + r, split));
    }
  }
}

void CombineSplits(const AttentionProblem& problem, int64_t row, void* memory) {
  const AttentionArgs& args = *problem.args;
  Worker<true> worker(problem, memory);
  worker.Begin(row / args.S / args.H, row / args.S % args.H, row % args.S, 1);
  worker.CombinePartials(PartialOf(problem, row, 0), problem.splits, problem.partial_stride);
  worker.Finish();
}

}  // namespace STOF_ISA::attention
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_KERNEL_H_
