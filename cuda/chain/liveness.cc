// SPDX-License-Identifier: Apache-2.0
#include "cuda/chain/liveness.h"

#include <algorithm>

namespace stof {
namespace cuda {
namespace {

constexpr int kMostRegisters = 96;  // of a thread, for what stays between passes
constexpr int kMostEarly = 48;      // with what the last passes read, taken in the first one

bool IsDear(ChainOp op) {
  switch (op) {
    case ChainOp::kExp:
    case ChainOp::kLog:
    case ChainOp::kSqrt:
    case ChainOp::kRsqrt:
    case ChainOp::kReciprocal:
    case ChainOp::kTanh:
    case ChainOp::kErf:
    case ChainOp::kSigmoid:
    case ChainOp::kSoftplus:
    case ChainOp::kSin:
    case ChainOp::kCos:
    case ChainOp::kSilu:
    case ChainOp::kGelu:
    case ChainOp::kGeluTanh:
    case ChainOp::kDiv:
    case ChainOp::kPow:
      return true;
    default:
      return false;
  }
}

}  // namespace

ChainScope::ChainScope(const Chain& chain, const ChainLayout& layout)
    : chain_(chain),
      l_(layout),
      varying_(layout.moving | 1u << layout.inner),
      kept_from_(chain.nodes.size(), -1),
      resident_(chain.nodes.size(), 0) {
  std::vector<uint8_t> used(chain.nodes.size(), 0);
  for (const ChainOutput& output : chain.outputs) {
    used[static_cast<size_t>(output.node)] = 1;
    phases_ = std::max(phases_, chain.nodes[static_cast<size_t>(output.node)].level + 1);
  }
  for (size_t i = chain.nodes.size(); i-- > 0;) {
    const ChainNode& node = chain.nodes[i];
    if (used[i] == 0) continue;
    for (int a = 0; a < ArityOf(node.op); ++a) used[static_cast<size_t>(node.arg[a])] = 1;
    if (IsReduction(node.op)) reductions_.push_back(static_cast<int>(i));
  }
  if (layout.reduces && !layout.streamed) Keep();
}

std::vector<int> ChainScope::ListComputedNodes(int phase) const {
  std::vector<uint8_t> seen(chain_.nodes.size(), 0);
  for (int node : reductions_) {
    const ChainNode& one = chain_.nodes[static_cast<size_t>(node)];
    if (one.level == phase + 1) seen[static_cast<size_t>(one.arg[0])] = 1;
  }
  for (const ChainOutput& output : chain_.outputs) {
    if (chain_.nodes[static_cast<size_t>(output.node)].level == phase) seen[static_cast<size_t>(output.node)] = 1;
  }
  std::vector<int> nodes;
  for (size_t i = chain_.nodes.size(); i-- > 0;) {
    const ChainNode& node = chain_.nodes[i];
    if (seen[i] == 0 || IsReduction(node.op) || KeptBefore(static_cast<int>(i), phase)) continue;
    nodes.push_back(static_cast<int>(i));
    for (int a = 0; a < ArityOf(node.op); ++a) seen[static_cast<size_t>(node.arg[a])] = 1;
  }
  std::reverse(nodes.begin(), nodes.end());
  return nodes;
}

std::vector<int> ChainScope::PassesOf(int node) const {
  std::vector<int> passes;
  for (int phase = 0; phase < phases_; ++phase) {
    const std::vector<int> wanted = ListComputedNodes(phase);
    if (std::binary_search(wanted.begin(), wanted.end(), node)) passes.push_back(phase);
  }
  return passes;
}

// Values of elements that several passes want: kept where they are dear to compute, or made of several inputs, as long
// as registers suffice; then inputs, as they were read.
void ChainScope::Keep() {
  const int elements = l_.repeats * l_.vector;
  int registers = 0;
  for (size_t i = chain_.nodes.size(); i-- > 0;) {
    const auto node = static_cast<int>(i);
    const ChainNode& one = chain_.nodes[i];
    if (!OfElement(node) || ArityOf(one.op) == 0 || IsReduction(one.op)) continue;
    int varying = 0;
    for (int a = 0; a < ArityOf(one.op); ++a) varying += OfElement(one.arg[a]) ? 1 : 0;
    if (!IsDear(one.op) && varying < 2) continue;
    if (varying == 2 && one.arg[0] == one.arg[1] && !IsDear(one.op)) continue;  // a square
    const std::vector<int> passes = PassesOf(node);
    if (passes.size() < 2 || registers + elements > kMostRegisters) continue;
    kept_from_[i] = passes.front();
    registers += elements;
  }
  for (size_t i = 0; i < chain_.nodes.size(); ++i) {
    const ChainNode& one = chain_.nodes[i];
    if (one.op != ChainOp::kRead || !OfElement(static_cast<int>(i))) continue;
    if (PassesOf(static_cast<int>(i)).size() < 2) continue;
    const int more = RegistersOf(l_.reads[static_cast<size_t>(one.which)]);
    if (registers + more > kMostRegisters) continue;
    registers += more;
    resident_[i] = 1;
  }
  // Measured on an H100: LayerNorm of 768 gains 9 %, add + LayerNorm, which has twice as much under way, would lose 15
  // %.
  int early = registers;
  for (const int node : ListComputedNodes(0)) {
    const ChainNode& one = chain_.nodes[static_cast<size_t>(node)];
    if (one.op != ChainOp::kRead || !OfElement(node) || resident_[static_cast<size_t>(node)] != 0) continue;
    early += RegistersOf(l_.reads[static_cast<size_t>(one.which)]);
  }
  for (size_t i = 0; i < chain_.nodes.size(); ++i) {
    const ChainNode& one = chain_.nodes[i];
    if (one.op != ChainOp::kRead || !OfElement(static_cast<int>(i)) || resident_[i] != 0) continue;
    const std::vector<int> passes = PassesOf(static_cast<int>(i));
    const int more = RegistersOf(l_.reads[static_cast<size_t>(one.which)]);
    if (passes.size() != 1 || passes[0] == 0 || early + more > kMostEarly) continue;
    early += more;
    resident_[i] = 1;
    early_.push_back(static_cast<int>(i));
  }
}

int ChainScope::RegistersOf(const ChainLayout::Ref& ref) const {
  const bool words = ref.along == ChainLayout::Along::kUnit;
  return l_.repeats *
         static_cast<int>(words ? std::max<int64_t>(1, l_.vector * SizeOf(ref.dtype) / 4) : int64_t{l_.vector});
}

}  // namespace cuda
}  // namespace stof
