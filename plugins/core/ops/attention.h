// SPDX-License-Identifier: Apache-2.0
// StofAttention: docs/reference/operators.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_ATTENTION_H_

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/mask/expr.h"
#include "plugins/core/mask/expr_eval.h"

namespace stof {

constexpr int kMostOperands = 13;

enum class TensorLayout : uint8_t { kBHSD, kBSHD, kBSN };

// Which heads of a BSN tensor are meant: as many as the operator has of it, from `first` on, of `total`.
struct PackedHeads {
  int64_t first = 0;
  int64_t total = 0;  // 0: the tensor holds no others
};

struct AttentionAttributes {
  std::string mask;
  bool has_scale = false;
  float scale = 0.0f;
  float softcap = 0.0f;
  std::array<TensorLayout, 4> layout = {};  // query, key, value, output
  int64_t num_heads = 0;                    // 0: from the shape
  int64_t kv_num_heads = 0;
  std::array<PackedHeads, 3> packed = {};  // query, key, value
  bool query_offset = false;
  EmptyRows empty_rows = EmptyRows::kZero;
  bool allow_tf32 = false;
  std::string kernel;                 // a hint
  std::vector<std::string> operands;  // roles of inputs 3, 4, ...
  bool lse = false;                   // the second output is asked for
};
Status ParseAttention(const AttributeReader& attributes, AttentionAttributes* parsed);

// One thing that a backend has made of a mask, for its next run; several threads may ask.
class Remembered {
 public:
  std::shared_ptr<const void> Get() const { return *what_.Lock(); }
  void Set(std::shared_ptr<const void> what) const { what_.Lock()->swap(what); }

 private:
  mutable ForkSafe<std::shared_ptr<const void>> what_;
};

// An expression ready to run: its parts, the key of the block mask cache, and the tables it was made of.
struct AttentionMask {
  MaskParts parts;
  uint64_t fixed_hash = 0;
  ExprOperands tables;
  Remembered compiled;  // cuda/mask/program/program_cache.h
  // plugins/core/mask/dilation.h: where modulus exceeds 1, the mask of every modulus-th query and key.
  int64_t modulus = 1;
  std::shared_ptr<const AttentionMask> of_residue;
};
using Tables = std::vector<std::pair<std::string, Tensor>>;
// The tensor that was given for an operand of an expression, of its rank and, a vector, of a type that it may have.
Status FindOperand(const ExprOperand& operand, const Tables& given, const Tensor** found);
Status MakeAttentionMask(const std::string& text, const Tables& tables, std::shared_ptr<const AttentionMask>* mask);

// Queries and keys of a part: with fewer, tiles would be emptier than those of the whole.
constexpr int64_t kLeastOfResidue = 64;
// Where a mask falls apart by remainders and the problem allows it, the problem becomes that of the parts side by side:
// batches or heads of an m-th of the length, whose rows lie m times as far apart. Operands are bound; true where it
// did.
bool SplitByResidue(const AttentionMask& mask, AttentionArgs* args, ExprSizes* sizes);

// The mask of an operator, parsed once: at creation where its tables are constant, else in the first run, and again
// only when a run brings other tables.
class AttentionMaskSource {
 public:
  explicit AttentionMaskSource(std::string text) : text_(std::move(text)) {}
  Status Fix(const Tables& tables);  // these, for ever
  Status Get(const Tables& given, std::shared_ptr<const AttentionMask>* mask) const;
  bool fixed() const { return fixed_ != nullptr; }

 private:
  std::string text_;
  std::shared_ptr<const AttentionMask> fixed_;
  mutable ForkSafe<std::shared_ptr<const AttentionMask>> last_;
};

// A part of a mask bound to one run's operands, for kernels that ask for it tile by tile. Evaluators hold scratch, so
// tiles of different threads take turns at a small stock of them.
class BoundDynamicMask {
 public:
  static Status Make(const MaskExpr& expr, const ExprSizes& sizes,
                     const std::vector<std::pair<std::string, Tensor>>& given,
                     std::unique_ptr<BoundDynamicMask>* bound);
  const DynamicMask* view() const { return &view_; }
  // Whether every tile could be evaluated: on a thread of a pool, which an exception would end with the process, there
  // may be no memory for an evaluator.
  Status status() const;

 private:
  BoundDynamicMask(const MaskExpr& expr, const ExprSizes& sizes, std::vector<ExprBinding> bindings)
      : expr_(expr),
        sizes_(sizes),
        bindings_(std::move(bindings)),
        view_{&BoundDynamicMask::Tile, this, expr.Uses(ExprOp::kB), expr.Uses(ExprOp::kH)} {}
  static int Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits);
  int Evaluate(int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits) const;
  std::unique_ptr<ExprEvaluator> Take() const;
  void Return(std::unique_ptr<ExprEvaluator> evaluator) const;

  const MaskExpr& expr_;
  ExprSizes sizes_;
  std::vector<ExprBinding> bindings_;
  DynamicMask view_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<ExprEvaluator>> stock_;
  mutable std::atomic<bool> failed_{false};
};

const OpDescription* AttentionDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_ATTENTION_H_
