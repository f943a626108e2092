// SPDX-License-Identifier: Apache-2.0
// StofAttention: docs/reference/operators.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/ops/attention_relative.h"

namespace stof {

constexpr int kTypedInputs = 3;  // query, key and value; operands follow
constexpr const char* kTensorNames[] = {"query", "key", "value"};

enum class TensorLayout : uint8_t { kBHSD, kBSHD, kBSN };
constexpr const char* kLayoutNames[] = {"BHSD", "BSHD", "BSN"};

// The heads of a packed BSN tensor that belong to the operator: as many as it has of it, from `first` on, of `total`.
struct PackedHeads {
  int64_t first = 0;
  int64_t total = 0;  // 0: the tensor holds no others
};

// Operands by index that describe packed sequences: tensors of batch size 1 that hold the sequences of a batch one
// behind the other. -1: not given.
struct SequenceRoles {
  int cumulative = -1;
  int first_position = -1;
  bool has_queries = false;  // query and output are packed, too, not key and value alone
  bool given() const { return cumulative >= 0; }
};

struct AttentionAttributes {
  std::string mask;
  std::optional<float> scale;  // absent: 1 / sqrt(D)
  float softcap = 0.0f;
  float skip_threshold = 0.0f;
  float block_threshold = 0.0f;
  std::array<TensorLayout, 4> layout = {};  // query, key, value, output
  int64_t num_heads = 0;                    // 0: from the shape
  int64_t kv_num_heads = 0;
  std::array<PackedHeads, 3> packed = {};  // query, key, value
  bool query_offset = false;
  EmptyRows empty_rows = EmptyRows::kZero;
  bool allow_tf32 = false, allow_bf16 = false;
  AttentionPrecision precision = AttentionPrecision::kFull;
  std::string kernel;                 // a hint
  std::vector<std::string> operands;  // roles of inputs 3, 4, ...
  SequenceRoles sequences;
  std::array<std::string, kRelativeRoleCount> relative_index;  // expressions of kRelativeRoles
  bool lse = false;                                            // the second output is asked for
};
// The roles that attribute `operands` may name, beside those of tables, and how many.
struct AttentionRoles {
  ArrayView<const char*> names = AttentionLimits::kRoles;
  int most = AttentionLimits::kMostOperands;
};
Status ParseAttention(const AttributeReader& attributes, AttentionAttributes* parsed, const AttentionRoles& roles = {});

// Queries and keys of a residue class: with fewer, tiles would be emptier than those of the whole.
constexpr int64_t kMinResidueLength = 64;
// Turns a problem with a dilated mask into dense ones, one for each residue class of positions: batches or heads of an
// m-th of the length whose rows lie m times as far apart. Operands are bound. False where mask or problem do not allow
// it.
bool SplitByResidue(const AttentionMask& mask, AttentionArgs* args, ExprSizes* sizes);

// OpDescription::limits of every attention operator; `own` is one that it has besides.
std::vector<OpLimit> ListAttentionLimits(Target target, DType dtype, const OpLimit& own);

const OpDescription* AttentionDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_H_
