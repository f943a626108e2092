// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/relative/separated_expr.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "plugins/core/mask/expr_operate.h"

namespace stof {
namespace {

constexpr uint8_t kReadsQuery = 1, kReadsKey = 2;

bool IsConstantProduct(const MaskExpr& expr, const ExprNode& node, int side) {
  return node.op == ExprOp::kMul && expr.nodes()[static_cast<size_t>(node.child[side])].op == ExprOp::kConst;
}

bool IsSum(const MaskExpr& expr, const ExprNode& node) {
  return node.op == ExprOp::kAdd || node.op == ExprOp::kSub || node.op == ExprOp::kNeg ||
         IsConstantProduct(expr, node, 0) || IsConstantProduct(expr, node, 1);
}

// False where the coefficient overflows.
bool AddTerm(int32_t node, int64_t factor, std::map<int32_t, int64_t>* terms) {
  int64_t& coefficient = (*terms)[node];
  if (__builtin_add_overflow(coefficient, factor, &coefficient) || coefficient == INT64_MIN) return false;
  if (coefficient == 0) terms->erase(node);
  return true;
}

bool IsNegative(const std::map<int32_t, int64_t>& a, const std::map<int32_t, int64_t>& b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](const auto& x, const auto& y) {
           return x.first == y.first && x.second == -y.second;
         });
}

}  // namespace

bool SeparatedExpr::Make(const MaskExpr& expr, SeparatedExpr* separated) {
  SeparatedExpr made;
  made.expr_ = expr;
  made.Number();
  if (!made.Visit(expr.root())) return false;
  *separated = std::move(made);
  return true;
}

void SeparatedExpr::Number() {
  using Form = std::array<int64_t, 7>;
  std::map<Form, int32_t> known;
  for (size_t i = 0; i < expr_.nodes().size(); ++i) {
    const ExprNode& node = expr_.nodes()[i];
    uint8_t reads = node.op == ExprOp::kQ ? kReadsQuery : node.op == ExprOp::kK ? kReadsKey : 0;
    Form form = {static_cast<int64_t>(node.op), node.operand, node.value, -1, -1, -1, -1};
    for (int c = 0; c < node.arity; ++c) {
      const auto child = static_cast<size_t>(node.child[c]);
      reads |= reads_[child];
      form[static_cast<size_t>(3 + c)] = same_[child];
    }
    reads_.push_back(reads);
    same_.push_back(known.emplace(form, static_cast<int32_t>(i)).first->second);
  }
}

bool SeparatedExpr::AddTerms(int32_t i, int64_t factor, Sum* sum) const {
  const ExprNode& node = Node(i);
  if (node.op == ExprOp::kAdd || node.op == ExprOp::kSub) {
    return AddTerms(node.child[0], factor, sum) &&
           AddTerms(node.child[1], node.op == ExprOp::kSub ? -factor : factor, sum);
  }
  if (node.op == ExprOp::kNeg) return AddTerms(node.child[0], -factor, sum);
  for (const int side : {0, 1}) {
    int64_t product = 0;
    if (!IsConstantProduct(expr_, node, side)) continue;
    if (__builtin_mul_overflow(factor, Node(node.child[side]).value, &product)) return false;
    // A factor of the smallest integer has no opposite.
    return product != INT64_MIN && AddTerms(node.child[1 - side], product, sum);
  }
  Terms* const kinds[] = {&sum->constant, &sum->query, &sum->key, &sum->mixed};
  return AddTerm(same_[static_cast<size_t>(i)], factor, kinds[reads_[static_cast<size_t>(i)]]);
}

bool SeparatedExpr::Visit(int32_t i) {
  const ExprNode& node = Node(i);
  const uint8_t reads = reads_[static_cast<size_t>(i)];
  if (reads == 0) return true;
  if (IsSum(expr_, node) || reads != (kReadsQuery | kReadsKey)) {
    Sum sum;
    return AddTerms(i, 1, &sum) && AddDifference(i, sum);
  }
  return std::all_of(node.child, node.child + node.arity, [this](int32_t child) { return Visit(child); });
}

bool SeparatedExpr::AddDifference(int32_t node, const Sum& sum) {
  Difference found;
  found.others = sum.constant;
  for (const auto& [term, factor] : sum.mixed) {
    found.others[term] = factor;
    if (!Visit(term)) return false;
  }
  if (!sum.key.empty() || !sum.query.empty()) {
    // 2 * k - 2 * q is twice k - q.
    Terms key = sum.key, query = sum.query;
    int64_t factor = 0;
    for (const Terms* const terms : {&key, &query}) {
      for (const auto& term : *terms) factor = std::gcd(factor, term.second);
    }
    for (Terms* const terms : {&key, &query}) {
      for (auto& term : *terms) term.second /= factor;
    }
    if (!has_difference_) {
      has_difference_ = true;
      key_ = key, query_ = query;
      // k - q rather than q - k.
      const auto first = key_.empty() ? query_.begin() : key_.begin();
      if ((first->second < 0) != key_.empty()) {
        for (Terms* const terms : {&key_, &query_}) {
          for (auto& term : *terms) term.second = -term.second;
        }
      }
    }
    if (key_ == key && query_ == query) {
      found.factor = factor;
    } else if (IsNegative(key_, key) && IsNegative(query_, query)) {
      found.factor = -factor;
    } else {
      return false;
    }
  }
  differences_[node] = std::move(found);
  return true;
}

bool SeparatedExpr::is_distance() const {
  const auto is_one = [this](const Terms& terms, ExprOp op, int64_t factor) {
    return terms.size() == 1 && Node(terms.begin()->first).op == op && terms.begin()->second == factor;
  };
  return is_one(key_, ExprOp::kK, 1) && is_one(query_, ExprOp::kQ, -1);
}

// The nodes that the roots need, arguments first. by_difference: differences are given, their parts are not needed.
std::vector<int32_t> SeparatedExpr::NodesOf(const Terms& roots, bool by_difference) const {
  std::vector<uint8_t> needed(expr_.nodes().size(), 0);
  for (const auto& root : roots) needed[static_cast<size_t>(root.first)] = 1;
  std::vector<int32_t> nodes;
  for (auto i = static_cast<int32_t>(needed.size()); i-- > 0;) {  // parents come after children
    if (needed[static_cast<size_t>(i)] == 0) continue;
    nodes.push_back(i);
    const auto difference = by_difference ? differences_.find(i) : differences_.end();
    if (difference != differences_.end()) {
      for (const auto& term : difference->second.others) needed[static_cast<size_t>(term.first)] = 1;
      continue;
    }
    const ExprNode& node = Node(i);
    for (int c = 0; c < node.arity; ++c) needed[static_cast<size_t>(node.child[c])] = 1;
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

int64_t SeparatedExpr::Lookup(const ExprNode& node, const std::vector<int64_t>& values) const {
  const ExprOperand& table = *expr_.operands()[static_cast<size_t>(node.operand)];
  int64_t flat = 0;
  for (int axis = 0; axis < node.arity; ++axis) {
    const int64_t index = values[static_cast<size_t>(node.child[axis])];
    flat = flat * table.dims[axis] + std::clamp<int64_t>(index, 0, table.dims[axis] - 1);  // in range: see Check
  }
  return table.At(flat);
}

int64_t SeparatedExpr::Evaluate(const ExprNode& node, const ExprSizes& sizes, int64_t q, int64_t k,
                                const std::vector<int64_t>& values) const {
  const auto argument = [&](int c) { return c < node.arity ? values[static_cast<size_t>(node.child[c])] : 0; };
  switch (node.op) {
    case ExprOp::kConst:
      return node.value;
    case ExprOp::kQ:
      return q;
    case ExprOp::kK:
      return k;
    case ExprOp::kS:
      return sizes.S;
    case ExprOp::kT:
      return sizes.T;
    case ExprOp::kP:
      return sizes.P;
    case ExprOp::kLookup:
      return Lookup(node, values);
    default:
      return Operate<int64_t>(node.op, argument(0), argument(1));
  }
}

// A sum of terms fits, what it is made of may wrap: hence unsigned.
uint64_t SeparatedExpr::SumOf(const Terms& terms, const std::vector<int64_t>& values) {
  uint64_t sum = 0;
  for (const auto& [node, factor] : terms) {
    sum += static_cast<uint64_t>(factor) * static_cast<uint64_t>(values[static_cast<size_t>(node)]);
  }
  return sum;
}

void SeparatedExpr::EvaluateParts(const ExprSizes& sizes, std::vector<int64_t>* key_part,
                                  std::vector<int64_t>* query_part) const {
  std::vector<int64_t> values(expr_.nodes().size());
  const std::vector<int32_t> of_key = NodesOf(key_, false), of_query = NodesOf(query_, false);
  key_part->clear(), query_part->clear();
  for (int64_t k = 0; k < sizes.T; ++k) {
    for (const int32_t i : of_key) values[static_cast<size_t>(i)] = Evaluate(Node(i), sizes, 0, k, values);
    key_part->push_back(static_cast<int64_t>(SumOf(key_, values)));
  }
  for (int64_t q = sizes.P; q < sizes.P + sizes.S; ++q) {
    for (const int32_t i : of_query) values[static_cast<size_t>(i)] = Evaluate(Node(i), sizes, q, 0, values);
    query_part->push_back(static_cast<int64_t>(0 - SumOf(query_, values)));
  }
}

void SeparatedExpr::EvaluateRows(const ExprSizes& sizes, int64_t low, int64_t count, std::vector<int64_t>* rows) const {
  const std::vector<int32_t> nodes = NodesOf({{expr_.root(), 1}}, true);
  std::vector<const Difference*> differences;
  for (const int32_t i : nodes) {
    const auto found = differences_.find(i);
    differences.push_back(found == differences_.end() ? nullptr : &found->second);
  }
  std::vector<int64_t> values(expr_.nodes().size());
  rows->clear();
  for (int64_t at = low; at < low + count; ++at) {
    for (size_t n = 0; n < nodes.size(); ++n) {
      int64_t& value = values[static_cast<size_t>(nodes[n])];
      if (differences[n] == nullptr) {
        value = Evaluate(Node(nodes[n]), sizes, 0, 0, values);
      } else {
        value = static_cast<int64_t>(static_cast<uint64_t>(differences[n]->factor) * static_cast<uint64_t>(at) +
                                     SumOf(differences[n]->others, values));
      }
    }
    rows->push_back(values[static_cast<size_t>(expr_.root())]);
  }
}

}  // namespace stof
