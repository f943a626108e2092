// SPDX-License-Identifier: Apache-2.0
// Mask expressions (docs/reference/mask-format.md) as a tree, with the one parser and printer for every backend. Their
// operators on values are in expr_operate.h, on intervals in interval.h.
#ifndef STOF_PLUGINS_CORE_MASK_EXPR_H_
#define STOF_PLUGINS_CORE_MASK_EXPR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

enum class ExprOp : uint8_t {
  kConst,
  kB,
  kH,
  kQ,
  kK,
  kS,
  kT,
  kP,  // integers
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMod,
  kNeg,
  kAbs,
  kMin,
  kMax,  // integers of integers
  kLt,
  kLe,
  kGt,
  kGe,
  kEq,
  kNe,  // booleans of integers
  kAnd,
  kOr,
  kNot,
  kTrue,
  kFalse,   // booleans of booleans
  kLookup,  // operand[index, ...]
};

// The text of an operator or symbol, with blanks around a binary operator; "" where it has no word of its own.
const char* Symbol(ExprOp op);

// One node; children precede their parents, so a program is a plain array walked upwards.
struct ExprNode {
  ExprOp op = ExprOp::kConst;
  bool boolean = false;
  uint8_t arity = 0;
  int32_t child[4] = {-1, -1, -1, -1};
  int32_t operand = -1;  // kLookup: index into MaskExpr::operands
  int64_t value = 0;     // kConst
};

// A vector or table that the expression reads. Tables are constants and own their data, which all expressions with an
// equal table share. Run-time operands are bound for each evaluation.
struct ExprOperand {
  std::string name;
  bool table = false;
  bool boolean = false;
  int rank = 0;
  int64_t dims[4] = {};            // of tables
  std::vector<int64_t> wide;       // of integer tables, row-major
  std::vector<uint8_t> bytes;      // of boolean and uint8 tables: an S×T one fits where eight times its size would not
  std::vector<int64_t> block_min;  // of tables: minimum and maximum of every kBlock elements, for interval look-ups
  std::vector<int64_t> block_max;
  int64_t lo = 0, hi = 0;  // of tables: minimum and maximum
  uint64_t hash = 0;       // HashTable with seed 0; of a run-time operand, of its name
  static constexpr int64_t kBlock = 64;

  int64_t At(int64_t i) const { return wide.empty() ? bytes[static_cast<size_t>(i)] : wide[static_cast<size_t>(i)]; }
};
using ExprOperands = std::vector<std::shared_ptr<const ExprOperand>>;

// The table of one name; an equal one that is alive anywhere in the process is shared.
Status MakeTable(const std::string& name, const Tensor& tensor, std::shared_ptr<const ExprOperand>* table);
uint64_t HashTable(const ExprOperand& table, uint64_t seed);  // of name, type, dims and data
// Whether a table is equal to the tensor.
bool TableHolds(const ExprOperand& table, const Tensor& tensor);
bool IsTableName(std::string_view name);  // "table0", "table1", ...

struct ExprSizes {
  int64_t B = 1, H = 1, S = 0, T = 0, P = 0;

  bool operator==(const ExprSizes& o) const { return B == o.B && H == o.H && S == o.S && T == o.T && P == o.P; }
  uint64_t Hash() const;
  std::string Print() const;  // "B 1 H 12 S 512 T 512 P 0"
};

// Run-time data of one operand, in the order of MaskExpr::operands; table entries are ignored.
struct ExprBinding {
  const void* data = nullptr;
  DType dtype = DType::kUndefined;
  int rank = 0;
  int64_t dims[4] = {};
  int64_t lo = 0, hi = 0;  // smallest and largest element; MaskExpr::Check fills them in
};

class MaskExpr {
 public:
  static constexpr int kMaxDepth = 64;
  static constexpr int kMaxNodes = 4096;
  static constexpr int kMaxText = 65536;
  static constexpr int64_t kMaxConstant = int64_t{1} << 53;
  static constexpr int64_t kMaxSize = int64_t{1} << 22;
  // Expressions with more nodes than kMaxAnyNodes are limited by nodes * S * T: a run cannot be interrupted.
  static constexpr int kMaxAnyNodes = 128;
  static constexpr int64_t kMaxWork = int64_t{1} << 38;

  // `tables` are the constants by name ("table0"); every other operand is a run-time one. Blank text means True.
  static Status Parse(std::string_view text, const Tables& tables, MaskExpr* expr);
  // An integer of the same grammar: what names a row of a relative table. No text is no integer.
  static Status ParseInteger(std::string_view text, const Tables& tables, MaskExpr* expr);

  const std::vector<ExprNode>& nodes() const { return nodes_; }
  const ExprOperands& operands() const { return operands_; }
  int root() const { return root_; }
  bool empty() const { return nodes_.empty(); }

  std::string Print() const;
  // Of the printed form and the tables; with seed 0 the same on every machine.
  uint64_t Hash(uint64_t seed = 0) const;
  bool Uses(ExprOp op) const;  // somewhere below the root
  bool UsesRuntime() const;    // a run-time operand is read
  bool IsPad() const;          // exactly pad[b, k]

  // The nodes that the top-level `and` joins, and the conjunction of some of them.
  std::vector<int> Conjuncts() const;
  MaskExpr Restrict(const std::vector<int>& conjuncts) const;

  // Proves for these sizes that nothing overflows and every table index is in range; also measures the bindings.
  Status Check(const ExprSizes& sizes, std::vector<ExprBinding>* bindings) const;
  // Whether all pairs of queries and keys may be evaluated; Check asks it, too.
  Status CheckWork(const ExprSizes& sizes) const;

 private:
  friend class ExprBuilder;
  std::vector<ExprNode> nodes_;
  ExprOperands operands_;
  int root_ = -1;
};

// The conjuncts of an expression by what they read. Without such conjuncts an expression is empty.
struct MaskParts {
  MaskExpr fixed;    // no run-time operand: the block mask holds these
  bool pad = false;  // pad[b, k]
  MaskExpr dynamic;  // the rest
};
MaskParts SplitMask(const MaskExpr& expr);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_EXPR_H_
