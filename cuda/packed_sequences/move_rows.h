// SPDX-License-Identifier: Apache-2.0
// The copies of PackedSequencesBackend (plugins/core/contract/packed_sequences.h), queued on `context.stream`:
// nothing is read on the host.
#ifndef STOF_CUDA_PACKED_SEQUENCES_MOVE_ROWS_H_
#define STOF_CUDA_PACKED_SEQUENCES_MOVE_ROWS_H_

#include "plugins/core/contract/op.h"
#include "plugins/core/contract/packed_sequences.h"

namespace stof {
namespace cuda {

Status UnpackSequences(const DeviceSequences& sequences, const SequenceRows* tensors, int count,
                       const KeyExistence& keys, const RunContext& context);
Status PackSequences(const DeviceSequences& sequences, const SequenceRows& tensor, const RunContext& context);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PACKED_SEQUENCES_MOVE_ROWS_H_
