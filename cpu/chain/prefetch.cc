// SPDX-License-Identifier: Apache-2.0
// Finds the rows of a program's batches that the hardware does not prefetch. docs/design/fused-chains.md has the gain
// of prefetching them one batch prefetches.
#include <algorithm>

#include "cpu/chain/chain.h"

namespace stof {
namespace cpu {
namespace {

// Whether each row is read or written once, and its elements are contiguous.
bool IsAccessedOnce(const BoundChain& bound, const int64_t* stride) {
  const int last = bound.axes - 1;
  for (int axis = 0; axis < last; ++axis) {
    if (stride[axis] == 0 && bound.size[axis] > 1) return false;
  }
  return stride[last] == 1;
}

// Merges a read's row into another one's that it overlaps or continues. False: they are apart.
bool TryMerge(const BoundChain& bound, const ChainPrefetch& own, ChainPrefetch* known) {
  const BoundRead &x = bound.reads[static_cast<size_t>(own.which)], &y = bound.reads[static_cast<size_t>(known->which)];
  if (x.input != y.input || !x.parts.empty() || !y.parts.empty()) return false;
  if (!std::equal(x.stride, x.stride + bound.axes, y.stride)) return false;
  const int64_t first = own.first + x.constant - y.constant, end = first + own.count;
  if (first > known->first + known->count || end < known->first) return false;
  const int64_t to = std::max(end, known->first + known->count);
  known->first = std::min(first, known->first);
  known->count = to - known->first;
  return true;
}

}  // namespace

// Prefetches short rows that are read once and not in the order of memory. Where all are, the hardware prefetches them.
void PlanPrefetches(ChainProgram* program) {
  if (!program->straight || program->batch == 1) return;
  const BoundChain& bound = program->bound;
  const int last = bound.axes - 1;
  std::vector<ChainPrefetch>& prefetches = program->prefetches;
  bool gaps = false;
  for (size_t i = 0; i < bound.reads.size(); ++i) {
    const BoundRead& read = bound.reads[i];
    const int64_t first = read.first[last], count = read.last[last] + 1 - first;
    if (read.never || count < 1 || !IsAccessedOnce(bound, read.stride)) continue;
    gaps = gaps || program->read_pitch[i] != bound.n;
    const ChainPrefetch own = {false, static_cast<int>(i), first, count};
    bool merged = false;
    for (size_t k = 0; k < prefetches.size() && !merged; ++k) merged = TryMerge(bound, own, &prefetches[k]);
    if (!merged) prefetches.push_back(own);
  }
  for (size_t i = 0; i < bound.outputs.size(); ++i) {
    if (!IsAccessedOnce(bound, bound.outputs[i].stride)) continue;
    gaps = gaps || program->output_pitch[i] != bound.n;
    prefetches.push_back({true, static_cast<int>(i), 0, bound.n});
  }
  if (!gaps) return prefetches.clear();
  program->steps = 0;
  for (const ChainPhase& phase : program->phases) {
    for (const ChainPiece& piece : phase.pieces) {
      const int64_t strips = (piece.end - piece.begin + program->strip - 1) / program->strip;
      program->steps += strips * static_cast<int64_t>(piece.element.size());
    }
  }
  program->steps = std::max<int64_t>(1, program->steps);
}

}  // namespace cpu
}  // namespace stof
