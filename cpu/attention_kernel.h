// SPDX-License-Identifier: Apache-2.0
// The entry points of one instruction set.
#ifndef STOF_CPU_ATTENTION_KERNEL_H_
#define STOF_CPU_ATTENTION_KERNEL_H_

#include "cpu/attention_rows.h"

namespace stof {
namespace cpu {
namespace STOF_ISA {

size_t ScratchBytes(const Problem& problem) { return Scratch(problem, nullptr).size; }

void Prepare(const Problem& problem, void* memory) {
  const Scratch scratch(problem, memory);
  *scratch.mean_of = -1;
  for (int64_t i = 0; i < problem.ring_tiles; ++i) scratch.ring_of[i] = -1;
  FillTailWords(problem, scratch.words_tail);
}

void Pack(const Problem& problem, int64_t first, int64_t last, void* memory) {
  const AttentionArgs& args = *problem.args;
  const Scratch scratch(problem, memory);
  for (int64_t i = first; i < last; ++i) {
    const int64_t g = i / problem.panels % args.G, b = i / problem.panels / args.G;
    const char* head =
        static_cast<const char*>(args.key) + SizeOf(args.dtype) * (b * args.key_stride.b + g * args.key_stride.h);
    PackKeys(head, i % problem.panels, args, scratch, problem.packed_keys + i * args.D * kPanel);
  }
}

void TileRow(const Problem& problem, int64_t item, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t row0 = item % problem.tile_rows * problem.m;
  const int64_t h = item / problem.tile_rows % args.H, b = item / problem.tile_rows / args.H;
  Worker<false> worker(problem, memory);
  worker.Begin(b, h, row0, Least(problem.m, args.S - row0));
  worker.Sweep(0, problem.key_tiles, false);
  worker.Finish();
}

float* PartialOf(const Problem& problem, int64_t row, int64_t chunk) {
  return problem.partial + (row * problem.chunks + chunk) * problem.partial_stride;
}

void Chunk(const Problem& problem, int64_t item, void* memory) {
  const AttentionArgs& args = *problem.args;
  const int64_t chunk = item % problem.chunks;
  const int64_t g = item / problem.chunks % args.G, b = item / problem.chunks / args.G;
  const int64_t heads = args.H / args.G, first = chunk * problem.chunk_tiles;
  Worker<true> worker(problem, memory);
  for (int64_t h = g * heads; h < (g + 1) * heads; ++h) {
    worker.Begin(b, h, 0, args.S);
    worker.Sweep(first, Least(first + problem.chunk_tiles, problem.key_tiles), false);
    if (problem.chunks == 1) {
      worker.Finish();
      continue;
    }
    for (int64_t r = 0; r < args.S; ++r) {
      worker.StorePartial(static_cast<int>(r), PartialOf(problem, (b * args.H + h) * args.S + r, chunk));
    }
  }
}

void Join(const Problem& problem, int64_t row, void* memory) {
  const AttentionArgs& args = *problem.args;
  Worker<true> worker(problem, memory);
  worker.Begin(row / args.S / args.H, row / args.S % args.H, row % args.S, 1);
  worker.JoinPartials(PartialOf(problem, row, 0), problem.chunks, problem.partial_stride);
  worker.Finish();
}

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_KERNEL_H_
