// SPDX-License-Identifier: Apache-2.0
// Packed sequences of StofAttention on a device: padded copies of their tensors, over which the kernels of padded
// batches run.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_PADDED_COPIES_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_PADDED_COPIES_H_

#include <string>

#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/packed_sequences.h"
#include "plugins/core/ops/attention.h"

namespace stof {

class PaddedCopies {
 public:
  // Sets S and T of the padded problem. Lengths are on the device: an operand must say T.
  Status Bind(const AttentionAttributes& attributes, const Tensor* inputs, AttentionArgs* args);
  // Allocates the copies and binds them in the place of bound tensors and padding mask. Nothing is copied yet.
  // is_pad_alone: no other mask forbids a key.
  Status Allocate(bool is_pad_alone, const RunContext& context, AttentionArgs* args, const Tensor** pad);
  // Queues the copies in front of attention, and that of its output behind it.
  Status Unpack(const PackedSequencesBackend& backend, const RunContext& context) const;
  Status Pack(const PackedSequencesBackend& backend, const RunContext& context) const;
  bool given() const { return is_bound_; }

 private:
  Status AllocateRows(const RunContext& context, int64_t heads, int64_t size, TensorView* view, SequenceRows* rows);
  Status CheckEmptyRows(const AttentionArgs& args) const;

  DeviceSequences sequences_;
  std::string name_;  // the role that says where sequences begin
  bool is_bound_ = false, has_queries_ = false, has_bias_ = false;
  DType dtype_ = DType::kF32;
  SequenceRows query_, key_, value_, output_;
  KeyExistence keys_;
  Tensor pad_;
};

// Bytes that PaddedCopies::Allocate asks for, each block rounded up to 64. Binds placeholders.
Status PlanPaddedCopies(bool is_pad_alone, PaddedCopies* copies, AttentionArgs* args, const Tensor** pad,
                        size_t* bytes);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_PADDED_COPIES_H_
