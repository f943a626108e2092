// SPDX-License-Identifier: Apache-2.0
// Packed sequences of StofAttention: tensors of batch size 1 that hold the sequences of a batch one behind the other,
// without padding. Operands say where each sequence begins. The problem stays the padded one: masks and biases read
// positions, and only rows and keys that exist are computed.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_SEQUENCES_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_SEQUENCES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/ops/attention.h"

namespace stof {

bool IsSequenceRole(const std::string& role);

// Finds the roles of packed sequences among attribute operands, and says which combinations are illegal.
Status ParseSequences(AttentionAttributes* parsed);

// Checks types and shapes of the operands, and gives the batch size that they say.
Status BindSequenceCount(const AttentionAttributes& attributes, const Tensor* inputs, int64_t* count);

// The positions of a padded sequence as operands say them. `name`: the operand; empty: none does, and `length` is 0.
struct PaddedLength {
  std::string name;
  int64_t length = 0;
};
Status FindPaddedLength(const AttentionAttributes& attributes, const Tensor* inputs, PaddedLength* padded);

// The sequences of one call on the CPU.
class HostSequences {
 public:
  // Reads and checks the operands, and sets S and T of the padded problem.
  Status Read(const AttentionAttributes& attributes, const Tensor* inputs, AttentionArgs* args);
  // Counts rows and keys of the bound arguments from the begin of each sequence, as the kernel does. Where pad forbids
  // no key that exists, which is usual, the kernel gets no padding mask.
  Status Bind(const RunContext& context, AttentionArgs* args) const;
  // Fills the rows of the bound output that belong to no sequence with zeros.
  void ClearRest(const AttentionArgs& args) const;
  bool given() const { return !starts_.empty(); }
  // Whether queries are packed, and no row belongs to a sequence.
  bool has_no_query() const { return has_queries_ && starts_.back() == 0; }
  // Rows and keys of each sequence in the padded problem.
  MaskShift shift() const {
    const int32_t* const first = is_shifted_ ? first_.data() : nullptr;
    return {has_queries_ ? first : nullptr, first};
  }

 private:
  Status CheckStarts(const std::string& name) const;
  Status CheckPositions(const std::string& name, const PaddedLength& padded) const;

  std::vector<int32_t> starts_, ends_, first_;  // [B + 1], [B], [B]; ends: the number of keys
  int64_t rows_ = 0;                            // of the packed tensors; those behind the last sequence belong to none
  int64_t longest_ = 0;
  bool has_queries_ = false, is_shifted_ = false;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_SEQUENCES_H_
