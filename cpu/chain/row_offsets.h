// SPDX-License-Identifier: Apache-2.0
// Offsets of a batch's rows in the inputs and outputs of a chain.
#ifndef STOF_CPU_CHAIN_ROW_OFFSETS_H_
#define STOF_CPU_CHAIN_ROW_OFFSETS_H_

#include <algorithm>
#include <cstdint>

#include "cpu/chain/chain_worker.h"

namespace stof {
namespace cpu {
namespace {

// The places of a row along the axes.
inline void ChainWorker::Index(int64_t row, int64_t* index) const {
  for (int axis = outer_; axis-- > 0;) {
    index[axis] = row % p_.bound.size[axis];
    row /= p_.bound.size[axis];
  }
}

inline void ChainWorker::QueuePrefetch(const Batch& batch) {
  int64_t index[kChainMostAxes] = {};
  Index(batch.first, index);
  prefetch_.Clear();
  for (const ChainPrefetch& a : p_.prefetches) {
    const auto which = static_cast<size_t>(a.which);
    int64_t place = a.first, pitch = 0, size = 0;
    const char* base = nullptr;
    if (a.output) {
      const BoundOutput& output = p_.bound.outputs[which];
      for (int axis = 0; axis < outer_; ++axis) place += index[axis] * output.stride[axis];
      base = static_cast<const char*>(job_.outputs[which]);
      pitch = p_.output_pitch[which], size = SizeOf(output.dtype);
    } else {
      const BoundRead& read = p_.bound.reads[which];
      place += ReadPlace(read, index, true);  // as all reads of a straight program are
      base = static_cast<const char*>(job_.inputs[read.input]);
      pitch = p_.read_pitch[which], size = SizeOf(read.dtype);
    }
    prefetch_.Add(base + place * size, pitch * size, batch.count, a.count * size);
  }
  lines_per_step_ = (prefetch_.lines() + p_.steps - 1) / p_.steps;
}

// Computes the offsets of rows first to first + count - 1.
inline void ChainWorker::Locate(int64_t first, int count) {
  count_ = count;
  const BoundChain& b = p_.bound;
  int64_t index[kChainMostAxes] = {};
  Index(first, index);
  for (int row = 0; row < count; ++row) {
    for (int axis = 0; axis < outer_; ++axis) places_.index[axis * p_.batch + row] = index[axis];
    for (size_t r = 0; r < b.reads.size(); ++r) {
      if (row == 0 || p_.read_pitch[r] == kNoPitch) LocateRead(r, row, index);
    }
    for (size_t o = 0; o < b.outputs.size(); ++o) {
      if (row > 0 && p_.output_pitch[o] != kNoPitch) continue;
      int64_t at = 0;
      for (int axis = 0; axis < outer_; ++axis) at += index[axis] * b.outputs[o].stride[axis];
      places_.output[static_cast<int64_t>(o) * p_.batch + row] = at;
    }
    if (p_.straight) return;
    for (int axis = outer_; axis-- > 0;) {
      if (++index[axis] < b.size[axis]) break;
      index[axis] = 0;
    }
  }
}

inline void ChainWorker::LocateRead(size_t r, int row, const int64_t* index) const {
  const BoundRead& read = p_.bound.reads[r];
  const int64_t slot = static_cast<int64_t>(r) * p_.batch + row;
  bool valid = !read.never;
  if (read.guarded) {
    for (int axis = 0; axis < outer_; ++axis) {
      valid = valid && index[axis] >= read.first[axis] && index[axis] <= read.last[axis];
    }
  }
  places_.read[slot] = ReadPlace(read, index, p_.linear[r] != 0);
  places_.valid[slot] = valid ? 1 : 0;
}

// Elements from the begin of its input; not linear: without what depends on the column.
inline int64_t ChainWorker::ReadPlace(const BoundRead& read, const int64_t* index, bool linear) const {
  auto at = static_cast<uint64_t>(read.constant);
  for (int axis = 0; axis < outer_; ++axis) {
    at += static_cast<uint64_t>(index[axis]) * static_cast<uint64_t>(read.stride[axis]);
  }
  for (size_t i = 0; linear && i < read.parts.size(); ++i) {
    const BoundRead::Part& part = read.parts[i];
    at += static_cast<uint64_t>(Value(part.index, index, 0)) * static_cast<uint64_t>(part.stride);
  }
  return static_cast<int64_t>(at);
}

inline int64_t ChainWorker::Affine(const ChainIndex& index, const int64_t* outer, int64_t column) const {
  auto sum = static_cast<uint64_t>(index.constant);
  for (int axis = 0; axis < outer_; ++axis) {
    sum += static_cast<uint64_t>(index.coefficient[axis]) * static_cast<uint64_t>(outer[axis]);
  }
  return static_cast<int64_t>(sum + static_cast<uint64_t>(index.coefficient[outer_]) * static_cast<uint64_t>(column));
}

inline int64_t ChainWorker::Value(const ChainIndex& index, const int64_t* outer, int64_t column) const {
  const int64_t affine = Affine(index, outer, column);
  if (index.kind == ChainIndex::Kind::kPlain) return affine;
  const int64_t quotient = FloorDiv(affine, index.divisor);
  return index.kind == ChainIndex::Kind::kQuotient ? quotient : affine - quotient * index.divisor;
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_ROW_OFFSETS_H_
