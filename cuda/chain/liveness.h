// SPDX-License-Identifier: Apache-2.0
// Which values of a chain each pass over a row computes, and which stay in registers from one pass to the next.
#ifndef STOF_CUDA_CHAIN_LIVENESS_H_
#define STOF_CUDA_CHAIN_LIVENESS_H_

#include <vector>

#include "cuda/chain/codegen.h"

namespace stof {
namespace cuda {

class ChainScope {
 public:
  ChainScope(const Chain& chain, const ChainLayout& layout);

  int phases() const { return phases_; }
  // Those that an output is made of.
  const std::vector<int>& reductions() const { return reductions_; }
  // Whether a node's value differs between the elements of a thread.
  bool OfElement(int node) const { return (l_.node_axes[static_cast<size_t>(node)] & varying_) != 0; }
  // Nodes that a pass computes, in order; what was kept or reduced before is not among them.
  std::vector<int> ListComputedNodes(int phase) const;
  // The pass whose value of the node is kept; -1: none.
  int KeptFrom(int node) const { return kept_from_[static_cast<size_t>(node)]; }
  bool KeptBefore(int node, int phase) const { return KeptFrom(node) >= 0 && KeptFrom(node) < phase; }
  // Whether a read stays in registers after its first pass.
  bool Resident(int node) const { return resident_[static_cast<size_t>(node)] != 0; }
  // Reads of later passes that the first one begins, so that nobody waits for them behind a sum.
  const std::vector<int>& early() const { return early_; }

 private:
  std::vector<int> PassesOf(int node) const;
  void Keep();
  int RegistersOf(const ChainLayout::Ref& ref) const;

  const Chain& chain_;
  const ChainLayout& l_;
  uint32_t varying_ = 0;
  int phases_ = 0;
  std::vector<int> reductions_, kept_from_, early_;
  std::vector<uint8_t> resident_;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_LIVENESS_H_
