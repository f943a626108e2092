// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/expr.h"

#include <algorithm>

#include "plugins/core/host/hash.h"

namespace stof {

const char* Symbol(ExprOp op) {
  switch (op) {
    case ExprOp::kOr:
      return " or ";
    case ExprOp::kAnd:
      return " and ";
    case ExprOp::kLt:
      return " < ";
    case ExprOp::kLe:
      return " <= ";
    case ExprOp::kGt:
      return " > ";
    case ExprOp::kGe:
      return " >= ";
    case ExprOp::kEq:
      return " == ";
    case ExprOp::kNe:
      return " != ";
    case ExprOp::kAdd:
      return " + ";
    case ExprOp::kSub:
      return " - ";
    case ExprOp::kMul:
      return " * ";
    case ExprOp::kDiv:
      return " // ";
    case ExprOp::kMod:
      return " % ";
    case ExprOp::kB:
      return "b";
    case ExprOp::kH:
      return "h";
    case ExprOp::kQ:
      return "q";
    case ExprOp::kK:
      return "k";
    case ExprOp::kS:
      return "S";
    case ExprOp::kT:
      return "T";
    case ExprOp::kP:
      return "P";
    case ExprOp::kTrue:
      return "True";
    case ExprOp::kFalse:
      return "False";
    case ExprOp::kAbs:
      return "abs";
    case ExprOp::kMin:
      return "min";
    case ExprOp::kMax:
      return "max";
    default:
      return "";
  }
}

namespace {

// Binding strength for minimal parentheses, following the grammar's levels.
int Level(const ExprNode& node) {
  switch (node.op) {
    case ExprOp::kOr:
      return 0;
    case ExprOp::kAnd:
      return 1;
    case ExprOp::kNot:
      return 2;
    case ExprOp::kLt:
    case ExprOp::kLe:
    case ExprOp::kGt:
    case ExprOp::kGe:
    case ExprOp::kEq:
    case ExprOp::kNe:
      return 3;
    case ExprOp::kAdd:
    case ExprOp::kSub:
      return 4;
    case ExprOp::kMul:
    case ExprOp::kDiv:
    case ExprOp::kMod:
      return 5;
    case ExprOp::kNeg:
      return 6;
    case ExprOp::kConst:
      return node.value < 0 ? 6 : 7;
    default:
      return 7;
  }
}

class Printer {
 public:
  explicit Printer(const MaskExpr& expr) : expr_(expr) {}
  std::string text;

  void Visit(int index, int level) {
    const ExprNode& node = expr_.nodes()[index];
    const int own = Level(node);
    if (own < level) text += '(';
    switch (node.op) {
      case ExprOp::kConst:
        text += std::to_string(node.value);
        break;
      case ExprOp::kNot:
        text += "not ";
        Visit(node.child[0], 2);
        break;
      case ExprOp::kNeg:
        text += '-';
        Visit(node.child[0], 7);
        break;
      case ExprOp::kAbs:
      case ExprOp::kMin:
      case ExprOp::kMax:
        text += Symbol(node.op);
        List(node, '(', ')');
        break;
      case ExprOp::kLookup:
        text += expr_.operands()[node.operand]->name;
        List(node, '[', ']');
        break;
      default:
        if (node.arity == 0) {
          text += Symbol(node.op);
        } else {  // binary, left-associative; comparisons do not chain
          Visit(node.child[0], own == 3 ? 4 : own);
          text += Symbol(node.op);
          Visit(node.child[1], own + 1);
        }
    }
    if (own < level) text += ')';
  }

 private:
  void List(const ExprNode& node, char open, char close) {
    text += open;
    for (int i = 0; i < node.arity; ++i) {
      if (i > 0) text += ", ";
      Visit(node.child[i], 4);
    }
    text += close;
  }
  const MaskExpr& expr_;
};

}  // namespace

uint64_t ExprSizes::Hash() const {
  return HashWords({static_cast<uint64_t>(B), static_cast<uint64_t>(H), static_cast<uint64_t>(S),
                    static_cast<uint64_t>(T), static_cast<uint64_t>(P)});
}

std::string ExprSizes::Print() const {
  return "B " + std::to_string(B) + " H " + std::to_string(H) + " S " + std::to_string(S) + " T " + std::to_string(T) +
         " P " + std::to_string(P);
}

std::string MaskExpr::Print() const {
  if (empty()) return "";
  Printer printer(*this);
  printer.Visit(root_, 0);
  return printer.text;
}

uint64_t MaskExpr::Hash(uint64_t seed) const {
  const std::string text = Print();
  uint64_t hash = HashBytes(text.data(), text.size(), seed);
  for (const auto& operand : operands_) {
    hash = MixHash(hash, seed == 0 || !operand->table ? operand->hash : HashTable(*operand, seed));
  }
  return hash;
}

bool MaskExpr::Uses(ExprOp op) const {
  return std::any_of(nodes_.begin(), nodes_.end(), [op](const ExprNode& node) { return node.op == op; });
}

bool MaskExpr::UsesRuntime() const {
  return std::any_of(nodes_.begin(), nodes_.end(), [this](const ExprNode& node) {
    return node.op == ExprOp::kLookup && !operands_[node.operand]->table;
  });
}

bool MaskExpr::IsPad() const {
  if (empty()) return false;
  const ExprNode& node = nodes_[root_];
  return node.op == ExprOp::kLookup && operands_[node.operand]->name == "pad" &&
         nodes_[node.child[0]].op == ExprOp::kB && nodes_[node.child[1]].op == ExprOp::kK;
}

std::vector<int> MaskExpr::Conjuncts() const {
  std::vector<int> found;
  if (empty()) return found;
  std::vector<int> pending = {root_};
  while (!pending.empty()) {
    const int node = pending.back();
    pending.pop_back();
    if (nodes_[node].op == ExprOp::kAnd) {
      pending.push_back(nodes_[node].child[1]);
      pending.push_back(nodes_[node].child[0]);
    } else {
      found.push_back(node);
    }
  }
  return found;
}

MaskExpr MaskExpr::Restrict(const std::vector<int>& conjuncts) const {
  MaskExpr result;
  if (conjuncts.empty()) return result;
  std::vector<bool> needed(nodes_.size(), false);
  for (int conjunct : conjuncts) needed[conjunct] = true;
  for (size_t i = nodes_.size(); i-- > 0;) {  // parents come after children
    if (!needed[i]) continue;
    for (int c = 0; c < nodes_[i].arity; ++c) needed[nodes_[i].child[c]] = true;
  }
  std::vector<int> moved(nodes_.size(), -1);
  std::vector<int> operand_moved(operands_.size(), -1);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!needed[i]) continue;
    ExprNode node = nodes_[i];
    for (int c = 0; c < node.arity; ++c) node.child[c] = moved[node.child[c]];
    if (node.op == ExprOp::kLookup) {
      int& operand = operand_moved[node.operand];
      if (operand < 0) {
        operand = static_cast<int>(result.operands_.size());
        result.operands_.push_back(operands_[node.operand]);
      }
      node.operand = operand;
    }
    moved[i] = static_cast<int>(result.nodes_.size());
    result.nodes_.push_back(node);
  }
  result.root_ = moved[conjuncts[0]];
  for (size_t i = 1; i < conjuncts.size(); ++i) {
    ExprNode node;
    node.op = ExprOp::kAnd;
    node.boolean = true;
    node.arity = 2;
    node.child[0] = result.root_;
    node.child[1] = moved[conjuncts[i]];
    result.root_ = static_cast<int>(result.nodes_.size());
    result.nodes_.push_back(node);
  }
  return result;
}

MaskParts SplitMask(const MaskExpr& expr) {
  MaskParts parts;
  std::vector<int> fixed;
  std::vector<int> dynamic;
  for (int conjunct : expr.Conjuncts()) {
    const MaskExpr part = expr.Restrict({conjunct});
    if (part.IsPad()) {
      parts.pad = true;
    } else if (part.UsesRuntime()) {
      dynamic.push_back(conjunct);
    } else if (part.nodes()[part.root()].op != ExprOp::kTrue) {
      fixed.push_back(conjunct);
    }
  }
  parts.fixed = expr.Restrict(fixed);
  parts.dynamic = expr.Restrict(dynamic);
  return parts;
}

}  // namespace stof
