// SPDX-License-Identifier: Apache-2.0
// The compiler of fused chains.
#ifndef STOF_CPU_CHAIN_COMPILER_H_
#define STOF_CPU_CHAIN_COMPILER_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "cpu/chain/chain.h"

namespace stof {
namespace cpu {

class ChainCompiler {
 public:
  ChainCompiler(const Chain& chain, const BoundChain& bound, int threads, ChainProgram* program)
      : chain_(chain), bound_(bound), p_(*program), threads_(threads) {}

  void Run();

 private:
  using Kind = ChainStep::Kind;
  const ChainNode& Node(int node) const { return nodes_[static_cast<size_t>(node)]; }
  bool IsConstant(int node) const { return Node(node).op == ChainOp::kConstant; }
  // One value a row.
  bool IsRow(int node) const { return !IsConstant(node) && (Node(node).axes >> chain_.last() & 1) == 0; }
  bool IsElement(int node) const { return (Node(node).axes >> chain_.last() & 1) != 0; }
  const BoundRead& ReadOf(int node) const { return bound_.reads[static_cast<size_t>(Node(node).which)]; }

  // ---- cpu/chain/compiler.cc ----
  void Simplify();
  void Plan();
  bool StoresElements(const ChainOutput& output) const {
    for (const auto& dim : output.dims) {
      if (std::find(dim.begin(), dim.end(), chain_.last()) != dim.end()) return true;
    }
    return false;
  }

  int RowValue(int node);
  void RowOutput(int which);

  // ---- cpu/chain/row_strategy.cc ----
  void Choose();
  bool IsStraight() const;
  template <typename Stride>
  int64_t Pitch(int first, Stride stride) const;
  int64_t ReadPitch(const BoundRead& read, int first) const;
  void Pitches(int first);
  void ChooseRun();
  bool IsDirect(int node) const;
  int FixedArg(int node);

  // ---- cpu/chain/registers.cc ----
  int New(ChainRegister::Kind kind);
  int Constant(float value);
  bool IsSingle(int reg, bool in_row) const;
  void SetArguments(const int* from, bool in_row, ChainStep* step) const;
  // A step for a node, arguments by `arg`; dst is left open.
  template <typename Arg>
  ChainStep StepOf(int node, Arg arg, bool in_row = false) {
    const ChainNode& n = Node(node);
    ChainStep step;
    if (n.op == ChainOp::kRead) {
      step.kind = in_row ? Kind::kReadRow : Kind::kRead;
      step.which = static_cast<int16_t>(n.which);
    } else if (n.op == ChainOp::kAxis) {
      step.kind = in_row ? Kind::kAxis : Kind::kIndex;
      step.which = static_cast<int16_t>(n.which);
    } else {
      step.op = static_cast<int16_t>(n.op);
      int from[3] = {-1, -1, -1};
      for (int a = 0; a < ArityOf(n.op); ++a) from[a] = arg(n.arg[a]);
      SetArguments(from, in_row, &step);
    }
    return step;
  }
  void Reuse(std::vector<ChainStep>* element);
  void Place();

  // ---- cpu/chain/passes.cc ----
  bool IsSumOfProduct(int reduction) const;
  bool CanFuse(int node) const;
  int FusedArgument(int node) const;
  void Want(int node);
  void WantAll(int phase);
  void Phase();
  void Piece(int64_t begin, int64_t end);
  void OwnOutputs();
  int Element(int node);
  int Expand(int row);
  void Compute(int node);
  void Reduce(int node);
  void StoreElements(int which);

  // ---- cpu/chain/column_pieces.cc ----
  bool GoesByColumn(int node) const;
  bool Holds(int condition, int64_t column) const;
  std::vector<int64_t> Ends() const;
  void Take(int64_t begin);
  void Count();

  const Chain& chain_;
  const BoundChain& bound_;
  ChainProgram& p_;
  const int threads_;
  std::vector<ChainNode> nodes_;
  std::vector<int> uses_;
  std::vector<int> output_;  // node of each output; -1: not in this piece
  int phases_ = 1, phase_ = 0;
  bool keep_ = true;
  std::vector<uint8_t> fixed_, wanted_;
  std::vector<int> register_;  // of a row's value
  std::vector<int> whole_;     // of a value that is kept or fixed
  std::vector<int> value_;     // of an element's value in this phase
  std::vector<int> own_;
  std::vector<int> slots_;
  std::map<int, int> computed_;
  std::vector<int> kept_;
  std::map<int, int> expanded_;
  std::vector<ChainStep>* row_ = nullptr;
  std::vector<ChainStep>* element_ = nullptr;
  int strips_ = 0;
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_COMPILER_H_
