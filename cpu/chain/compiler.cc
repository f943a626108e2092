// SPDX-License-Identifier: Apache-2.0
// Compiles a bound chain to a program: decides which values belong to a row, to an element, or to all rows; in which
// pass over the row each is computed, which are kept between passes, and in which registers. This file has liveness and
// the values of rows; row_strategy.cc, passes.cc, column_pieces.cc and registers.cc have the rest.
#include "cpu/chain/compiler.h"

#include <algorithm>
#include <limits>

namespace stof {
namespace cpu {
namespace {

// In simple operations of one element, roughly.
double CostOf(int op) {
  switch (static_cast<ChainOp>(op)) {
    case ChainOp::kExp:
    case ChainOp::kLog:
    case ChainOp::kSigmoid:
    case ChainOp::kSilu:
    case ChainOp::kGeluTanh:
      return 12;
    case ChainOp::kSoftplus:
    case ChainOp::kTanh:
    case ChainOp::kErf:
    case ChainOp::kGelu:
    case ChainOp::kSin:
    case ChainOp::kCos:
      return 20;
    case ChainOp::kPow:
      return 60;
    case ChainOp::kSqrt:
    case ChainOp::kRsqrt:
    case ChainOp::kDiv:
    case ChainOp::kReciprocal:
      return 4;
    default:
      return 1;
  }
}

}  // namespace

void ChainCompiler::Run() {
  p_ = ChainProgram();
  p_.bound = bound_;
  Simplify();
  Plan();
  Choose();
  p_.phases.resize(static_cast<size_t>(phases_));
  for (const ChainOutput& output : chain_.outputs) output_.push_back(output.node);
  for (phase_ = 0; phase_ < phases_; ++phase_) Phase();
  for (size_t i = 0; i < chain_.outputs.size(); ++i) RowOutput(static_cast<int>(i));
  Place();
  PlanPrefetches(&p_);
}

// Turns small powers into products, and reductions of no element into their values.
void ChainCompiler::Simplify() {
  nodes_ = chain_.nodes;
  for (ChainNode& node : nodes_) {
    if (node.op == ChainOp::kPow && IsConstant(node.arg[1]) && Node(node.arg[1]).value == 2.0f) {
      node.op = ChainOp::kMul;
      node.arg[1] = node.arg[0];
    }
    if (!IsReduction(node.op) || bound_.n > 0) continue;
    const float inf = std::numeric_limits<float>::infinity();
    switch (node.op) {
      case ChainOp::kSum:
        node.value = 0.0f;
        break;
      case ChainOp::kMean:
        node.value = std::numeric_limits<float>::quiet_NaN();
        break;
      default:
        node.value = node.op == ChainOp::kMaxOf ? -inf : inf;
    }
    node.op = ChainOp::kConstant;
    node.axes = 0;
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {  // what follows of that
    ChainNode& node = nodes_[i];
    if (ArityOf(node.op) == 0) continue;
    node.level = 0;
    node.axes = 0;
    for (int a = 0; a < ArityOf(node.op); ++a) {
      node.level = std::max(node.level, Node(node.arg[a]).level);
      node.axes |= Node(node.arg[a]).axes;
    }
    if (!IsReduction(node.op)) continue;
    ++node.level;
    node.axes &= ~(1u << chain_.last());
  }
}

// Counts the uses of each node; unused ones are not computed.
void ChainCompiler::Plan() {
  uses_.assign(nodes_.size(), 0);
  for (const ChainOutput& output : chain_.outputs) uses_[static_cast<size_t>(output.node)] += 2;  // never fused away
  for (size_t i = nodes_.size(); i-- > 0;) {
    if (uses_[i] == 0) continue;
    for (int a = 0; a < ArityOf(nodes_[i].op); ++a) ++uses_[static_cast<size_t>(nodes_[i].arg[a])];
    phases_ = std::max(phases_, nodes_[i].level + 1);
  }
  // The last reduction's value may go to outputs of rows alone.
  const auto wanted = [this](int level) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const int node = static_cast<int>(i);
      if (uses_[i] > 0 && nodes_[i].level >= level && (IsElement(node) || nodes_[i].level > level)) return true;
    }
    for (const ChainOutput& output : chain_.outputs) {
      if (Node(output.node).level == level && StoresElements(output)) return true;
    }
    return false;
  };
  while (phases_ > 1 && !wanted(phases_ - 1)) --phases_;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (uses_[i] > 0 && IsElement(static_cast<int>(i))) p_.cost += CostOf(static_cast<int>(nodes_[i].op));
    if (uses_[i] > 0 && IsReduction(nodes_[i].op)) p_.cost += 1;
  }
}

int ChainCompiler::RowValue(int node) {
  if (IsConstant(node)) return Constant(Node(node).value);
  int& known = register_[static_cast<size_t>(node)];
  if (known >= 0) return known;
  const ChainNode& n = Node(node);
  // Of a value that is the same along the row.
  if (IsReduction(n.op) && !IsElement(n.arg[0])) {
    const int arg = RowValue(n.arg[0]);
    if (n.op != ChainOp::kSum) return known = arg;
    const int from[3] = {arg, Constant(static_cast<float>(bound_.n)), -1};
    ChainStep step;
    step.op = static_cast<int16_t>(ChainOp::kMul);
    SetArguments(from, true, &step);
    step.dst = static_cast<int16_t>(known = New(ChainRegister::Kind::kRow));
    row_->push_back(step);
    return known;
  }
  ChainStep step = StepOf(node, [this](int arg) { return RowValue(arg); }, true);
  known = New(ChainRegister::Kind::kRow);
  step.dst = static_cast<int16_t>(known);
  row_->push_back(step);
  return known;
}

void ChainCompiler::RowOutput(int which) {
  const ChainOutput& output = chain_.outputs[static_cast<size_t>(which)];
  if (StoresElements(output)) return;
  row_ = &p_.last;
  ChainStep step;
  step.kind = Kind::kStoreRow;
  step.which = static_cast<int16_t>(which);
  step.a = static_cast<int16_t>(RowValue(output.node));
  if (IsSingle(step.a, true)) step.mask = 1;
  p_.last.push_back(step);
}

void CompileChain(const Chain& chain, const BoundChain& bound, int threads, ChainProgram* program) {
  ChainCompiler(chain, bound, threads, program).Run();
}

}  // namespace cpu
}  // namespace stof
