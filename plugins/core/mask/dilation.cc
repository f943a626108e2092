// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/dilation.h"

#include <algorithm>
#include <array>
#include <vector>

#include "plugins/core/mask/expr_builder.h"
#include "plugins/core/mask/interval.h"

namespace stof {
namespace {

// Σ of[i] * symbol i + constant.
struct Linear {
  enum Symbol { kQuery, kKey, kBatch, kHead, kRows, kKeys, kPast, kSymbols };
  std::array<int64_t, kSymbols> of = {};
  int64_t constant = 0;
};
constexpr ExprOp kSymbolOps[Linear::kSymbols] = {ExprOp::kQ, ExprOp::kK, ExprOp::kB, ExprOp::kH,
                                                 ExprOp::kS, ExprOp::kT, ExprOp::kP};

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

// Of a window, in keys of one residue class; measured on the CPU (docs/lab/cpu-experiments.md).
constexpr int64_t kMinReach = 6;

class Finder {
 public:
  explicit Finder(const MaskExpr& expr) : nodes_(expr.nodes()) {}

  // The m of a conjunct that holds where m divides q - k; 1 for other conjuncts.
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

  // How far a conjunct `abs(q - k) <= n` reaches; -1 for other conjuncts.
  int64_t ReachOf(int index) const {
    const ExprNode& node = nodes_[index];
    if (node.op != ExprOp::kLe && node.op != ExprOp::kLt) return -1;
    const ExprNode& left = nodes_[node.child[0]];
    Linear x, limit;
    if (left.op != ExprOp::kAbs || !LinearOf(left.child[0], &x) || !LinearOf(node.child[1], &limit)) return -1;
    if (!DividesDistance(x, 1) || !IsConstant(limit) || limit.constant < 1) return -1;
    return limit.constant - (node.op == ExprOp::kLt ? 1 : 0);
  }

  // Adds a node for positions m q' + r and m k' + r to the expression; -1 where it is not the same for every r.
  int Fold(int index, int64_t m, ExprBuilder* to) const {
    const ExprNode& node = nodes_[index];
    Linear x;
    if (!node.boolean && LinearOf(index, &x)) return AddLinear(x, m, to);
    if (node.op == ExprOp::kLookup) return -1;
    if (IsCompare(node.op)) {
      // Both sides may depend on the residue, their difference need not.
      Linear y;
      if (LinearOf(node.child[0], &x) && LinearOf(node.child[1], &y) && Add(y, -1, &x)) {
        const int difference = AddLinear(x, m, to);
        return difference < 0 ? -1 : to->Add(node.op, {difference, to->AddConstant(0)});
      }
    }
    int child[2] = {-1, -1};
    for (int i = 0; i < node.arity; ++i) {
      child[i] = Fold(node.child[i], m, to);
      if (child[i] < 0) return -1;
    }
    switch (node.arity) {
      case 0:
        return to->Add(node.op);
      case 1:
        return to->Add(node.op, {child[0]});
      default:
        return to->Add(node.op, {child[0], child[1]});
    }
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

  // x % m with a constant m, or abs(x) % m; m 1: the node is neither.
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

  static bool IsConstantAllowed(int64_t x) { return x <= MaskExpr::kMaxConstant && x >= -MaskExpr::kMaxConstant; }

  // m times the form without its constant, plus that; -1 where it depends on the residue, the batch or the head.
  static int AddLinear(const Linear& x, int64_t m, ExprBuilder* to) {
    // Query and key have the same residue: it cancels where their factors do.
    if (x.of[Linear::kQuery] + x.of[Linear::kKey] != 0) return -1;
    if (x.of[Linear::kBatch] != 0 || x.of[Linear::kHead] != 0 || !IsConstantAllowed(x.constant)) return -1;
    int sum = -1;
    for (size_t i = 0; i < x.of.size(); ++i) {
      int64_t scaled = 0;
      if (__builtin_mul_overflow(x.of[i], m, &scaled) || !IsConstantAllowed(scaled)) return -1;
      if (scaled == 0) continue;
      const int factor = to->AddConstant(scaled);
      const int term = to->Add(ExprOp::kMul, {factor, to->Add(kSymbolOps[i])});
      if (term < 0) return -1;
      sum = sum < 0 ? term : to->Add(ExprOp::kAdd, {sum, term});
    }
    if (sum >= 0 && x.constant == 0) return sum;
    const int constant = to->AddConstant(x.constant);
    return sum < 0 ? constant : to->Add(ExprOp::kAdd, {sum, constant});
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
    ExprBuilder builder;
    int root = -1;
    const auto fold = [&](int other) {
      if (other == chosen) return true;
      const int64_t reach = finder.ReachOf(other);
      if (reach >= 0 && reach / m < kMinReach) return false;
      const int folded = finder.Fold(other, m, &builder);
      root = root < 0 ? folded : builder.Add(ExprOp::kAnd, {root, folded});
      return folded >= 0 && root >= 0;
    };
    if (!std::all_of(conjuncts.begin(), conjuncts.end(), fold)) continue;
    return {m, builder.Build(root < 0 ? builder.Add(ExprOp::kTrue) : root)};
  }
  return {};
}

}  // namespace stof
