// SPDX-License-Identifier: Apache-2.0
// Which positions the rows of packed sequences have. All arrays may hold any numbers: no result leads out of bounds.
#ifndef STOF_CUDA_PACKED_SEQUENCES_SEQUENCE_ROWS_H_
#define STOF_CUDA_PACKED_SEQUENCES_SEQUENCE_ROWS_H_

#include <cstdint>

#include "cuda/common/host_device.h"
#include "plugins/core/contract/packed_sequences.h"

namespace stof {
namespace cuda {

// A sequence: its rows [begin, begin + length) have the positions from `first` on. An illegal one has none.
struct SequenceSpan {
  int64_t begin = 0, length = 0, first = 0;
  bool is_legal = false;
};

// Sequence b. are_starts_legal: HasLegalStarts of all entries.
STOF_HD inline SequenceSpan SpanOf(const DeviceSequences& sequences, bool are_starts_legal, int64_t b) {
  SequenceSpan span;
  const int64_t begin = sequences.starts[b], end = sequences.starts[b + 1];
  const int64_t first = sequences.first_positions == nullptr ? 0 : sequences.first_positions[b];
  if (!are_starts_legal || begin < 0 || end < begin || end > sequences.rows || first < 0 ||
      first + end - begin > sequences.positions) {
    return span;
  }
  span.is_legal = true, span.begin = begin, span.length = end - begin, span.first = first;
  return span;
}

// Whether starts begin at 0, rise and end at the number of rows or before it: a thread's share of the check, entries i,
// i + step, ... Otherwise sequences may overlap.
STOF_HD inline bool HasLegalStarts(const DeviceSequences& sequences, int64_t i, int64_t step) {
  bool is_legal = sequences.starts[0] == 0 && sequences.starts[sequences.B] <= sequences.rows;
  for (; i < sequences.B; i += step) is_legal = is_legal && sequences.starts[i] <= sequences.starts[i + 1];
  return is_legal;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PACKED_SEQUENCES_SEQUENCE_ROWS_H_
