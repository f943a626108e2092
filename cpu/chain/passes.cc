// SPDX-License-Identifier: Apache-2.0
// Emits one pass over the row: its computations, fused operators, kept values, reductions and stores.
#include <algorithm>

#include "cpu/chain/compiler.h"

namespace stof {
namespace cpu {

bool ChainCompiler::IsSumOfProduct(int reduction) const {
  const ChainNode& n = Node(reduction);
  return (n.op == ChainOp::kSum || n.op == ChainOp::kMean) && CanFuse(n.arg[0]) && IsElement(Node(n.arg[0]).arg[0]) &&
         IsElement(Node(n.arg[0]).arg[1]);
}

// A product with no other use.
bool ChainCompiler::CanFuse(int node) const {
  return Node(node).op == ChainOp::kMul && IsElement(node) && uses_[static_cast<size_t>(node)] == 1 &&
         fixed_[static_cast<size_t>(node)] == 0;
}

// Of a sum or difference; -1: none.
int ChainCompiler::FusedArgument(int node) const {
  const ChainNode& n = Node(node);
  if (n.op != ChainOp::kAdd && n.op != ChainOp::kSub) return -1;
  for (int a = 0; a < 2; ++a) {
    if (CanFuse(n.arg[a])) return a;
  }
  return -1;
}

void ChainCompiler::Want(int node) {
  const auto i = static_cast<size_t>(node);
  if (!IsElement(node) || fixed_[i] != 0 || wanted_[i] != 0) return;
  if (keep_ && computed_.count(node) != 0 && !IsDirect(node)) {
    kept_.push_back(node);
    return;
  }
  wanted_[i] = 1;
  const int fused = FusedArgument(node);
  for (int a = 0; a < ArityOf(Node(node).op); ++a) {
    const int arg = Node(node).arg[a];
    if (a != fused) {
      Want(arg);
      continue;
    }
    Want(Node(arg).arg[0]);
    Want(Node(arg).arg[1]);
  }
}

// Finds the values that the pass `phase` computes, and those among them that a later pass uses, too.
void ChainCompiler::WantAll(int phase) {
  wanted_.assign(nodes_.size(), 0);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const ChainNode& n = nodes_[i];
    if (uses_[i] == 0 || !IsReduction(n.op) || !IsElement(n.arg[0]) || Node(n.arg[0]).level != phase) continue;
    if (IsSumOfProduct(static_cast<int>(i))) {
      Want(Node(n.arg[0]).arg[0]);
      Want(Node(n.arg[0]).arg[1]);
    } else {
      Want(n.arg[0]);
    }
  }
  for (size_t i = 0; i < output_.size(); ++i) {
    if (output_[i] < 0 || !StoresElements(chain_.outputs[i])) continue;
    if (Node(output_[i]).level == phase) Want(output_[i]);
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (wanted_[i] != 0) computed_.insert({static_cast<int>(i), phase});
  }
}

void ChainCompiler::Phase() {
  if (phase_ == 0) {
    for (int phase = 0; phase < phases_; ++phase) WantAll(phase);
    computed_.clear();
    for (int node : kept_) {
      if (whole_[static_cast<size_t>(node)] < 0) {
        whole_[static_cast<size_t>(node)] = New(ChainRegister::Kind::kWhole);
      }
    }
  }
  const std::vector<int64_t> ends = Ends();
  if (ends.size() < 2) {
    Piece(0, bound_.n);
    return;
  }
  const std::vector<ChainNode> nodes = nodes_;
  const std::vector<int> uses = uses_, output = output_;
  // Copies of a read have no sides.
  bool copies = false;
  for (int& node : output_) {
    if (Node(node).op == ChainOp::kRead) {
      copies = true;
    } else {
      node = -1;
    }
  }
  if (copies) Piece(0, bound_.n);
  int64_t begin = 0;
  for (const int64_t end : ends) {
    for (size_t i = 0; i < output_.size(); ++i) {
      output_[i] = Node(output[i]).op == ChainOp::kRead ? -1 : output[i];
    }
    computed_.clear();  // by the piece before
    Take(begin);
    Piece(begin, end);
    nodes_ = nodes;
    begin = end;
  }
  uses_ = uses;
  output_ = output;
}

void ChainCompiler::Piece(int64_t begin, int64_t end) {
  WantAll(phase_);
  ChainPhase& phase = p_.phases[static_cast<size_t>(phase_)];
  phase.pieces.emplace_back();
  ChainPiece& piece = phase.pieces.back();
  piece.begin = begin, piece.end = end;
  row_ = &phase.row;
  element_ = &piece.element;
  value_.assign(nodes_.size(), -1);
  expanded_.clear();
  OwnOutputs();
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const int node = static_cast<int>(i);
    if (wanted_[i] != 0) Compute(node);
    const ChainNode& n = nodes_[i];
    if (uses_[i] > 0 && IsReduction(n.op) && IsElement(n.arg[0]) && Node(n.arg[0]).level == phase_) Reduce(node);
  }
  for (size_t i = 0; i < chain_.outputs.size(); ++i) StoreElements(static_cast<int>(i));
  Reuse(&piece.element);
}

// Values that are computed in place: in a dense fp32 output.
void ChainCompiler::OwnOutputs() {
  own_.assign(nodes_.size(), -1);
  for (size_t i = 0; i < chain_.outputs.size(); ++i) {
    const int node = output_[i];
    const BoundOutput& out = bound_.outputs[i];
    if (node < 0 || Node(node).level != phase_ || out.dtype != DType::kF32 || !StoresElements(chain_.outputs[i]))
      continue;
    if (out.stride[chain_.last()] != 1 || !IsElement(node) || whole_[static_cast<size_t>(node)] >= 0) continue;
    if (Node(node).op == ChainOp::kRead) continue;
    own_[static_cast<size_t>(node)] = static_cast<int>(i);
  }
}

int ChainCompiler::Element(int node) {
  if (IsConstant(node)) return Constant(Node(node).value);
  const auto i = static_cast<size_t>(node);
  if (IsElement(node)) {
    if (fixed_[i] != 0 || (whole_[i] >= 0 && value_[i] < 0)) return whole_[i];
    return value_[i];
  }
  const int row = RowValue(node);
  return p_.batch == 1 || IsSingle(row, true) ? row : Expand(row);
}

int ChainCompiler::Expand(int row) {
  const auto known = expanded_.find(row);
  if (known != expanded_.end()) return known->second;
  ChainStep step;
  step.kind = Kind::kExpand;
  step.a = static_cast<int16_t>(row);
  step.dst = static_cast<int16_t>(New(ChainRegister::Kind::kStrip));
  element_->push_back(step);
  return expanded_[row] = step.dst;
}

void ChainCompiler::Compute(int node) {
  const auto i = static_cast<size_t>(node);
  ChainStep step;
  const int fused = FusedArgument(node);
  if (fused >= 0) {
    const ChainNode& n = Node(node);
    const ChainNode& product = Node(n.arg[fused]);
    const int from[3] = {Element(product.arg[0]), Element(product.arg[1]), Element(n.arg[1 - fused])};
    step.op = n.op == ChainOp::kAdd ? kFusedMulAdd : fused == 0 ? kFusedMulSub : kFusedSubMul;
    SetArguments(from, false, &step);
  } else {
    step = StepOf(node, [this](int arg) { return Element(arg); });
  }
  int dst = whole_[i];
  if (dst < 0) {
    dst = New(own_[i] >= 0 ? ChainRegister::Kind::kOutput : ChainRegister::Kind::kStrip);
    p_.registers[static_cast<size_t>(dst)].output = own_[i];
  }
  step.dst = static_cast<int16_t>(dst);
  value_[i] = dst;
  element_->push_back(step);
}

void ChainCompiler::Reduce(int node) {
  const ChainNode& n = Node(node);
  ChainStep step;
  step.kind = Kind::kReduce;
  step.op = static_cast<int16_t>(n.op);
  if (IsSumOfProduct(node)) {
    step.a = static_cast<int16_t>(Element(Node(n.arg[0]).arg[0]));
    step.b = static_cast<int16_t>(Element(Node(n.arg[0]).arg[1]));
  } else {
    step.a = static_cast<int16_t>(Element(n.arg[0]));
  }
  ChainReduction reduction;
  reduction.op = n.op;
  reduction.phase = phase_;
  reduction.row = New(ChainRegister::Kind::kRow);
  step.which = static_cast<int16_t>(p_.reductions.size());
  p_.reductions.push_back(reduction);
  register_[static_cast<size_t>(node)] = reduction.row;
  element_->push_back(step);
}

void ChainCompiler::StoreElements(int which) {
  const ChainOutput& output = chain_.outputs[static_cast<size_t>(which)];
  const int node = output_[static_cast<size_t>(which)];
  if (node < 0 || !StoresElements(output) || Node(node).level != phase_) return;
  int from = Element(node);
  if (IsSingle(from, false)) {
    ChainStep copy;
    copy.op = kFusedCopy;
    copy.mask = 1;
    copy.a = static_cast<int16_t>(from);
    copy.dst = static_cast<int16_t>(from = New(ChainRegister::Kind::kStrip));
    element_->push_back(copy);
  }
  ChainStep step;
  step.kind = Kind::kStore;
  step.which = static_cast<int16_t>(which);
  step.a = static_cast<int16_t>(from);
  element_->push_back(step);
}

}  // namespace cpu
}  // namespace stof
