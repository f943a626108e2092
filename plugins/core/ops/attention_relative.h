// SPDX-License-Identifier: Apache-2.0
// Relative positions of StofAttention: which row of a table each pair of a query and a key names. Attribute
// relative_index has an integer expression for each table; a run evaluates it for its sizes.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_RELATIVE_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_RELATIVE_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/mask/columns/cache_slot.h"
#include "plugins/core/relative/separated_expr.h"

namespace stof {

struct AttentionAttributes;

constexpr const char* kRelativeRoles[] = {"relative_key", "relative_key1", "relative_query", "relative_value"};
constexpr int kRelativeRoleCount = 4;
bool IsRelativeRole(const std::string& role);

// The texts of attribute relative_index by role, blank for roles that are not given. Reports roles that need each
// other, too.
Status ParseRelativeIndex(const std::string& text, AttentionAttributes* parsed);

// The rows of one table for the sizes of a run, and the arrays that RelativeRows points to.
class RelativeRowArrays {
 public:
  // rows: of the table.
  static Status Make(const std::string& role, const SeparatedExpr& separated, const ExprSizes& sizes, int64_t rows,
                     std::shared_ptr<const RelativeRowArrays>* made);
  const RelativeRows& view() const { return view_; }
  // Whether they are those of such an expression.
  bool Suits(const MaskExpr& expr, const ExprSizes& sizes, int64_t rows) const;

 private:
  Status FillParts(const std::string& role, const SeparatedExpr& separated, int64_t* first);
  void FillRows(const SeparatedExpr& separated, int64_t first);

  std::string text_;  // of the expression
  ExprOperands operands_;
  ExprSizes sizes_;
  int64_t rows_ = 0;
  std::vector<int32_t> key_part_, query_part_, row_;
  RelativeRows view_;
  MaskCacheSlot on_device_;
};

// The expressions of an operator, parsed as AttentionMaskSource parses a mask.
class RelativeIndices {
 public:
  // Holds the rows of a run.
  using Rows = std::array<std::shared_ptr<const RelativeRowArrays>, kRelativeRoleCount>;

  explicit RelativeIndices(const std::array<std::string, kRelativeRoleCount>& texts) : texts_(texts) {}
  // Parses with these tables; Bind then ignores those that it is given.
  Status Fix(const Tables& tables);
  // Gives the tables of the arguments their rows. sizes: of the padded problem. Without queries or keys there is no
  // pair, and the arguments get no tables.
  Status Bind(const Tables& given, const ExprSizes& sizes, AttentionArgs* args, Rows* rows) const;

 private:
  using Separated = std::array<std::shared_ptr<const SeparatedExpr>, kRelativeRoleCount>;
  Status Parse(const Tables& tables, Separated* separated) const;
  Status Get(const Tables& given, Separated* separated) const;

  std::array<std::string, kRelativeRoleCount> texts_;
  bool is_fixed_ = false;
  Separated fixed_;
  mutable ForkSafe<Separated> last_;
  mutable ForkSafe<Rows> last_rows_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_RELATIVE_H_
