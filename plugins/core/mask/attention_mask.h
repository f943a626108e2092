// SPDX-License-Identifier: Apache-2.0
// The mask of an attention operator: its expression parsed and split, and its conjuncts bound to the operands of a run.
#ifndef STOF_PLUGINS_CORE_MASK_ATTENTION_MASK_H_
#define STOF_PLUGINS_CORE_MASK_ATTENTION_MASK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/mask/columns/cache_slot.h"
#include "plugins/core/mask/columns/key_columns.h"
#include "plugins/core/mask/dynamic_mask.h"
#include "plugins/core/mask/expr.h"
#include "plugins/core/mask/expr_eval.h"

namespace stof {

// An expression ready to run: its conjuncts, the key of the block mask cache, and the tables it reads.
struct AttentionMask {
  MaskParts parts;
  uint64_t fixed_hash = 0;
  ExprOperands tables;
  MaskCacheSlot compiled;  // cuda/mask/program/program_cache.h
  // Where modulus exceeds 1 the mask is dilated, and of_residue is that of one residue class: plugins/core/mask/
  // dilation.h.
  int64_t modulus = 1;
  std::shared_ptr<const AttentionMask> of_residue;
  std::shared_ptr<const ColumnSource> columns;  // nullptr: none
};

Status MakeAttentionMask(const std::string& text, const Tables& tables, std::shared_ptr<const AttentionMask>* mask);
// has_columns: its key columns may be gathered.
std::shared_ptr<const AttentionMask> MakeAttentionMask(const MaskExpr& expr, bool has_columns = true);
// The tensor given for an operand of an expression; checks its rank, and the data type of a vector.
Status FindOperand(const ExprOperand& operand, const Tables& given, const Tensor** found);

// The mask of an operator, parsed once: at creation where its tables are constant, else in the first run, and again
// only when a run brings other tables.
class AttentionMaskSource {
 public:
  explicit AttentionMaskSource(std::string text) : text_(std::move(text)) {}
  // Parses with these tables; Get then ignores those that it is given.
  Status Fix(const Tables& tables);
  Status Get(const Tables& given, std::shared_ptr<const AttentionMask>* mask) const;
  bool is_fixed() const { return fixed_ != nullptr; }

 private:
  std::string text_;
  std::shared_ptr<const AttentionMask> fixed_;
  mutable ForkSafe<std::shared_ptr<const AttentionMask>> last_;
};

// Added to rows and keys of each sequence [B] before an expression is evaluated. nullptr: 0 for all.
struct MaskShift {
  const int32_t* rows = nullptr;
  const int32_t* keys = nullptr;
};

// An expression bound to one run's operands, for kernels that ask for it tile by tile. Evaluators hold scratch memory:
// tiles of different threads share a small stock of them.
class BoundDynamicMask {
 public:
  // alike_heads: DynamicMask::alike_heads.
  static Status Make(const MaskExpr& expr, const ExprSizes& sizes, const Tables& given,
                     std::unique_ptr<BoundDynamicMask>* bound, int64_t alike_heads = 1, const MaskShift& shift = {});
  const DynamicMask* view() const { return &view_; }
  // An error where memory for an evaluator was missing: the tile function cannot fail, and an exception would end the
  // process on a pool's thread.
  Status status() const;

 private:
  BoundDynamicMask(const MaskExpr& expr, const ExprSizes& sizes, std::vector<ExprBinding> bindings, int64_t alike_heads,
                   const MaskShift& shift)
      : expr_(expr),
        sizes_(sizes),
        bindings_(std::move(bindings)),
        shift_(shift),
        view_{&BoundDynamicMask::Tile,
              this,
              expr.Uses(ExprOp::kB) || shift.rows != nullptr || shift.keys != nullptr,
              expr.Uses(ExprOp::kH),
              &BoundDynamicMask::Runs,
              alike_heads} {}
  int64_t RowShift(int64_t b) const { return shift_.rows == nullptr ? 0 : shift_.rows[b]; }
  int64_t KeyShift(int64_t b) const { return shift_.keys == nullptr ? 0 : shift_.keys[b]; }
  static int Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits);
  static int64_t Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                      KeyTileRun* runs);
  int64_t List(int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last, KeyTileRun* runs) const;
  int Evaluate(int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits) const;
  std::unique_ptr<ExprEvaluator> Take() const;
  void Return(std::unique_ptr<ExprEvaluator> evaluator) const;

  const MaskExpr& expr_;
  ExprSizes sizes_;
  std::vector<ExprBinding> bindings_;
  MaskShift shift_;
  DynamicMask view_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<ExprEvaluator>> stock_;
  mutable std::atomic<bool> failed_{false};
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_ATTENTION_MASK_H_
