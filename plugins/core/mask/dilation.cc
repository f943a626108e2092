// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/dilation.h"

#include <algorithm>
#include <array>
#include <vector>

namespace stof {
namespace {

// Σ of[i] * symbol i + constant.
struct Linear {
  enum Symbol { kQuery, kKey, kBatch, kHead, kRows, kKeys, kPast, kSymbols };
  std::array<int64_t, kSymbols> of = {};
  int64_t constant = 0;
};
constexpr const char* kNames[Linear::kSymbols] = {"q", "k", "b", "h", "S", "T", "P"};

bool Add(const Linear& x, int64_t scale, Linear* sum) {
  const auto add = [scale](int64_t from, int64_t* to) {
    int64_t product = 0;
    return !__builtin_mul_overflow(from, scale, &product) && !__builtin_add_overflow(*to, product, to);
  };
  for (size_t i = 0; i < x.of.size(); ++i) {
    if (!add(x.of[i], &sum->of[i])) return false;
  }
  return add(x.constant, &sum->constant);
}

bool IsConstant(const Linear& x) { return x.of == decltype(x.of){}; }

bool IsComparison(ExprOp op) {
  switch (op) {
    case ExprOp::kLt:
    case ExprOp::kLe:
    case ExprOp::kGt:
    case ExprOp::kGe:
    case ExprOp::kEq:
    case ExprOp::kNe:
      return true;
    default:
      return false;
  }
}

constexpr int64_t kLeastReach =
    6;  // of a window, in keys of one remainder; measured on the CPU (docs/lab/cpu-experiments.md)

class Finder {
 public:
  explicit Finder(const MaskExpr& expr) : nodes_(expr.nodes()) {}

  // The m of a conjunct that says: m divides q - k. 1: it does not say so.
  int64_t ModulusOf(int index) const {
    const ExprNode& node = nodes_[index];
    if (node.op != ExprOp::kEq) return 1;
    Remainder left = RemainderOf(node.child[0]);
    const Remainder right = RemainderOf(node.child[1]);
    const int64_t m = std::max(left.m, right.m);
    if (m == 1) return 1;
    if (right.m == 1) return IsZero(node.child[1]) && DividesDistance(left.x, m) ? m : 1;
    if (left.m == 1) return IsZero(node.child[0]) && DividesDistance(right.x, m) ? m : 1;
    // q % m == k % m
    if (left.absolute || right.absolute) return 1;
    return left.m == right.m && Add(right.x, -1, &left.x) && DividesDistance(left.x, m) ? m : 1;
  }

  // How far a conjunct `abs(q - k) <= n` reaches; -1: it says something else.
  int64_t ReachOf(int index) const {
    const ExprNode& node = nodes_[index];
    if (node.op != ExprOp::kLe && node.op != ExprOp::kLt) return -1;
    const ExprNode& left = nodes_[node.child[0]];
    Linear x, limit;
    if (left.op != ExprOp::kAbs || !LinearOf(left.child[0], &x) || !LinearOf(node.child[1], &limit)) return -1;
    if (!DividesDistance(x, 1) || !IsConstant(limit) || limit.constant < 1) return -1;
    return limit.constant - (node.op == ExprOp::kLt ? 1 : 0);
  }

  // The text of a node for positions m q' + r and m k' + r; false where it is not the same for every r.
  bool Fold(int index, int64_t m, std::string* text) const {
    const ExprNode& node = nodes_[index];
    Linear x;
    if (!node.boolean && LinearOf(index, &x)) return Print(x, m, text);
    if (node.op == ExprOp::kTrue || node.op == ExprOp::kFalse) {
      *text += Symbol(node.op);
      return true;
    }
    if (IsComparison(node.op)) {
      // Remainders may be on both sides, and then in neither's favour.
      Linear y;
      if (LinearOf(node.child[0], &x) && LinearOf(node.child[1], &y) && Add(y, -1, &x)) {
        *text += '(';
        if (!Print(x, m, text)) return false;
        *text += std::string(Symbol(node.op)) + "0)";
        return true;
      }
    }
    switch (node.op) {
      case ExprOp::kNot:
        return Called("not (", node, m, text);
      case ExprOp::kNeg:
        return Called("-(", node, m, text);
      case ExprOp::kAbs:
      case ExprOp::kMin:
      case ExprOp::kMax:
        return Called(std::string(Symbol(node.op)) + "(", node, m, text);
      default:
        break;
    }
    if (node.op == ExprOp::kLookup || node.arity != 2) return false;
    *text += '(';
    if (!Fold(node.child[0], m, text)) return false;
    *text += Symbol(node.op);
    if (!Fold(node.child[1], m, text)) return false;
    *text += ')';
    return true;
  }

 private:
  bool LinearOf(int index, Linear* x) const {
    const ExprNode& node = nodes_[index];
    switch (node.op) {
      case ExprOp::kConst:
        x->constant = node.value;
        return true;
      case ExprOp::kQ:
        x->of[Linear::kQuery] = 1;
        return true;
      case ExprOp::kK:
        x->of[Linear::kKey] = 1;
        return true;
      case ExprOp::kB:
        x->of[Linear::kBatch] = 1;
        return true;
      case ExprOp::kH:
        x->of[Linear::kHead] = 1;
        return true;
      case ExprOp::kS:
        x->of[Linear::kRows] = 1;
        return true;
      case ExprOp::kT:
        x->of[Linear::kKeys] = 1;
        return true;
      case ExprOp::kP:
        x->of[Linear::kPast] = 1;
        return true;
      case ExprOp::kNeg: {
        Linear own;
        return LinearOf(node.child[0], &own) && Add(own, -1, x);
      }
      case ExprOp::kAdd:
      case ExprOp::kSub: {
        Linear left, right;
        return LinearOf(node.child[0], &left) && LinearOf(node.child[1], &right) && Add(left, 1, x) &&
               Add(right, node.op == ExprOp::kAdd ? 1 : -1, x);
      }
      case ExprOp::kMul: {
        Linear left, right;
        if (!LinearOf(node.child[0], &left) || !LinearOf(node.child[1], &right)) return false;
        if (IsConstant(left)) return Add(right, left.constant, x);
        return IsConstant(right) && Add(left, right.constant, x);
      }
      default:
        return false;
    }
  }

  bool IsZero(int index) const {
    Linear x;
    return LinearOf(index, &x) && IsConstant(x) && x.constant == 0;
  }

  // x % m with a constant m, or m 1. absolute: of x with either sign, which is 0 for both or for none.
  struct Remainder {
    int64_t m = 1;
    bool absolute = false;
    Linear x;
  };
  Remainder RemainderOf(int index) const {
    const ExprNode& node = nodes_[index];
    Linear divisor;
    Remainder found;
    if (node.op != ExprOp::kMod || !LinearOf(node.child[1], &divisor) || !IsConstant(divisor)) return {};
    const ExprNode& of = nodes_[node.child[0]];
    found.absolute = of.op == ExprOp::kAbs;
    if (divisor.constant < 2 || !LinearOf(found.absolute ? of.child[0] : node.child[0], &found.x)) return {};
    found.m = divisor.constant;
    return found;
  }

  // Whether x is q - k or k - q, up to a multiple of m.
  static bool DividesDistance(const Linear& x, int64_t m) {
    Linear rest = x;
    const int64_t sign = x.of[Linear::kQuery];
    rest.of[Linear::kQuery] = rest.of[Linear::kKey] = 0;
    return (sign == 1 || sign == -1) && x.of[Linear::kKey] == -sign && IsConstant(rest) && rest.constant % m == 0;
  }

  static bool Print(const Linear& x, int64_t m, std::string* text) {
    // Remainders of query and key are the same one: it goes where both count as much, with opposite signs.
    if (x.of[Linear::kQuery] + x.of[Linear::kKey] != 0) return false;
    if (x.of[Linear::kBatch] != 0 || x.of[Linear::kHead] != 0) return false;
    *text += '(';
    for (size_t i = 0; i < x.of.size(); ++i) {
      int64_t scaled = 0;
      if (__builtin_mul_overflow(x.of[i], m, &scaled) || scaled > MaskExpr::kMaxConstant ||
          scaled < -MaskExpr::kMaxConstant) {
        return false;
      }
      if (scaled != 0) *text += "(" + std::to_string(scaled) + ") * " + kNames[i] + " + ";
    }
    *text += "(" + std::to_string(x.constant) + "))";
    return x.constant <= MaskExpr::kMaxConstant && x.constant >= -MaskExpr::kMaxConstant;
  }

  bool Called(const std::string& name, const ExprNode& node, int64_t m, std::string* text) const {
    *text += name;
    for (int i = 0; i < node.arity; ++i) {
      if (i > 0) *text += ", ";
      if (!Fold(node.child[i], m, text)) return false;
    }
    *text += ')';
    return true;
  }

  const std::vector<ExprNode>& nodes_;
};

}  // namespace

ResidueMask FindResidues(const MaskExpr& expr) {
  const Finder finder(expr);
  const std::vector<int> conjuncts = expr.Conjuncts();
  for (const int chosen : conjuncts) {
    const int64_t m = finder.ModulusOf(chosen);
    if (m == 1) continue;
    ResidueMask found = {m, ""};
    bool same = true;
    for (const int other : conjuncts) {
      if (other == chosen || !same) continue;
      if (!found.text.empty()) found.text += " and ";
      const int64_t reach = finder.ReachOf(other);
      same = (reach < 0 || reach / m >= kLeastReach) && finder.Fold(other, m, &found.text);
    }
    if (same) return found;
  }
  return {};
}

}  // namespace stof
