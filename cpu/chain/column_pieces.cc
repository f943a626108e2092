// SPDX-License-Identifier: Apache-2.0
// Splits rows into pieces of columns: where a select depends on the column, each piece takes one side of it.
#include <algorithm>

#include "cpu/chain/compiler.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kPieceColumns = 16;  // the least of a piece: two vectors
constexpr size_t kMostPieces = 8;

}  // namespace

// Whether a select asks for the column alone, and which side of a comparison the column is then.
bool ChainCompiler::GoesByColumn(int node) const {
  if (Node(node).op != ChainOp::kSelect || fixed_[static_cast<size_t>(node)] != 0) return false;
  const ChainNode& condition = Node(Node(node).arg[0]);
  if (condition.op < ChainOp::kLt || condition.op > ChainOp::kGe) return false;
  const auto is_column = [this](int arg) { return Node(arg).op == ChainOp::kAxis && Node(arg).which == chain_.last(); };
  return (is_column(condition.arg[0]) && IsConstant(condition.arg[1])) ||
         (is_column(condition.arg[1]) && IsConstant(condition.arg[0]));
}

bool ChainCompiler::Holds(int condition, int64_t column) const {
  const ChainNode& n = Node(condition);
  const auto value = [&](int arg) { return IsConstant(arg) ? Node(arg).value : static_cast<float>(column); };
  const float x = value(n.arg[0]), y = value(n.arg[1]);
  switch (n.op) {
    case ChainOp::kLt:
      return x < y;
    case ChainOp::kLe:
      return x <= y;
    case ChainOp::kGt:
      return x > y;
    default:
      return x >= y;
  }
}

// Of the pieces in which every such select takes one side.
std::vector<int64_t> ChainCompiler::Ends() const {
  std::vector<int64_t> ends = {bound_.n};
  if (phases_ > 1) return ends;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (uses_[i] == 0) continue;
    if (IsReduction(nodes_[i].op)) return {bound_.n};
    if (!GoesByColumn(static_cast<int>(i))) continue;
    const int condition = nodes_[i].arg[0];
    int64_t low = 0, high = bound_.n;  // the first column that differs from column 0
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (Holds(condition, middle) == Holds(condition, 0)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    ends.push_back(low);
  }
  if (ends.size() == 1) return ends;
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  int64_t begin = 0;
  for (const int64_t end : ends) {
    if (end - begin < kPieceColumns) return {bound_.n};
    begin = end;
  }
  return ends.size() > kMostPieces ? std::vector<int64_t>{bound_.n} : ends;
}

// Nodes as they are in the piece from column `begin` on.
void ChainCompiler::Take(int64_t begin) {
  std::vector<int> same(nodes_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    same[i] = static_cast<int>(i);
    ChainNode& n = nodes_[i];
    if (GoesByColumn(static_cast<int>(i))) same[i] = same[static_cast<size_t>(n.arg[Holds(n.arg[0], begin) ? 1 : 2])];
    for (int a = 0; a < ArityOf(n.op); ++a) n.arg[a] = same[static_cast<size_t>(n.arg[a])];
  }
  for (int& node : output_) node = node < 0 ? -1 : same[static_cast<size_t>(node)];
  Count();
  // x + -y * z is x - y * z to the bit.
  for (ChainNode& n : nodes_) {
    if (n.op != ChainOp::kAdd) continue;
    for (int a = 0; a < 2 && n.op == ChainOp::kAdd; ++a) {
      if (!CanFuse(n.arg[a])) continue;
      ChainNode& product = nodes_[static_cast<size_t>(n.arg[a])];
      for (int& factor : product.arg) {
        if (&factor == &product.arg[2] || n.op != ChainOp::kAdd || Node(factor).op != ChainOp::kNeg) continue;
        factor = Node(factor).arg[0];
        n.op = ChainOp::kSub;
      }
      if (n.op == ChainOp::kSub && a == 0) std::swap(n.arg[0], n.arg[1]);
    }
  }
  Count();
}

void ChainCompiler::Count() {
  uses_.assign(nodes_.size(), 0);
  for (const int node : output_) {
    if (node >= 0) uses_[static_cast<size_t>(node)] += 2;
  }
  for (size_t i = nodes_.size(); i-- > 0;) {
    for (int a = 0; uses_[i] > 0 && a < ArityOf(nodes_[i].op); ++a) ++uses_[static_cast<size_t>(nodes_[i].arg[a])];
  }
}

}  // namespace cpu
}  // namespace stof
