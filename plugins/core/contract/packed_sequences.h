// SPDX-License-Identifier: Apache-2.0
// Packed sequences on a device: copies between packed and padded rows around kernels that take padded batches.
#ifndef STOF_PLUGINS_CORE_CONTRACT_PACKED_SEQUENCES_H_
#define STOF_PLUGINS_CORE_CONTRACT_PACKED_SEQUENCES_H_

#include <cstdint>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

struct RunContext;  // plugins/core/contract/op.h

// B sequences whose rows lie one behind the other. Arrays are device addresses and may hold any numbers. Illegal ones
// make the outputs of their sequences NaN.
struct DeviceSequences {
  const int32_t* starts = nullptr;           // [B + 1]: sequence b is rows starts[b] to starts[b + 1] - 1
  const int32_t* first_positions = nullptr;  // [B]: the position of row 0 of each sequence; nullptr: 0 for all
  int64_t B = 0;
  int64_t rows = 0;       // of the packed tensors; those from starts[B] on belong to no sequence
  int64_t positions = 0;  // of a padded sequence
};

// The heads of one tensor: packed [rows, heads, size] by strides in elements, padded [B, heads, positions, size].
struct SequenceRows {
  void* packed = nullptr;
  void* padded = nullptr;
  Strides packed_stride;  // b is not read
  int64_t heads = 0, size = 0;
  DType dtype = DType::kF32;
  // Positions are in tiles of so many, from position 0 on. Those without a packed row become 0 in tiles that have a
  // packed row; other tiles are not written. The number of positions or more: all become 0.
  int64_t tile = 1;
  // [B, heads, size]: memory for the mean of each sequence's rows; nullptr: none. The mean is written instead of 0;
  // with KeyExistence::keeps_whole_sequences, to all rows of sequences whose keys are all forbidden, and nowhere else.
  void* means = nullptr;
};

// Which keys of the padded copy attention may read.
struct KeyExistence {
  uint8_t* pad = nullptr;  // [B, positions]: 1 where the key exists and `given` is not 0, and in illegal sequences
  Tensor given;            // [B or 1, positions], a key padding mask; kUndefined: none
  // Where `given` forbids all keys of a sequence, all that exist are marked.
  bool keeps_whole_sequences = false;
  // [B, positions]: 0 where the key exists, or where the sequence has no key; else -inf. nullptr: not asked for.
  float* bias = nullptr;
};

constexpr int kMaxUnpackedTensors = 3;  // tensors: query, key and value

struct PackedSequencesBackend {
  // Fills the padded rows of kMaxUnpackedTensors tensors at most, with NaN in illegal sequences, and marks the keys.
  Status (*unpack)(const DeviceSequences& sequences, const SequenceRows* tensors, int count, const KeyExistence& keys,
                   const RunContext& context) = nullptr;
  // Fills packed rows: with zeros those behind the last sequence, and with NaN those of illegal ones.
  Status (*pack)(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext& context) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_PACKED_SEQUENCES_H_
