// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/chain/params.h"

namespace stof {
namespace cuda {
namespace {

// The nodes that `root` is made of, up to reductions that earlier passes have found.
void Want(const Chain& chain, int root, uint32_t* wanted) {
  std::vector<uint8_t> seen(chain.nodes.size(), 0);
  seen[static_cast<size_t>(root)] = 1;
  for (int i = root; i >= 0; --i) {
    if (seen[static_cast<size_t>(i)] == 0) continue;
    wanted[i / 32] |= 1u << (i % 32);
    const ChainNode& node = chain.nodes[static_cast<size_t>(i)];
    if (IsReduction(node.op)) continue;
    for (int a = 0; a < ArityOf(node.op); ++a) seen[static_cast<size_t>(node.arg[a])] = 1;
  }
}

bool HasLast(const Chain& chain, const ChainOutput& output) {
  for (const std::vector<int>& dim : output.dims) {
    if (std::find(dim.begin(), dim.end(), chain.last()) != dim.end()) return true;
  }
  return false;
}

}  // namespace

bool MakeChainParams(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                     int sm_count, ChainParams* params) {
  ChainParams& p = *params;
  p = ChainParams();
  if (bound.reads.size() > kChainReads) return false;
  p.nodes = static_cast<int32_t>(chain.nodes.size());
  for (size_t i = 0; i < chain.nodes.size(); ++i) {
    const ChainNode& node = chain.nodes[i];
    p.node[i].op = static_cast<uint8_t>(node.op);
    p.node[i].which = static_cast<uint8_t>(node.which);
    p.node[i].value = node.value;
    for (int a = 0; a < 3; ++a) p.node[i].arg[a] = static_cast<int16_t>(node.arg[a]);
  }
  int parts = 0;
  for (size_t i = 0; i < bound.reads.size(); ++i) {
    const BoundRead& read = bound.reads[i];
    ChainReadParams& r = p.read[i];
    r.data = inputs[read.input];
    r.constant = read.constant;
    std::copy_n(read.stride, kChainMostAxes, r.stride);
    std::copy_n(read.first, kChainMostAxes, r.first);
    std::copy_n(read.last, kChainMostAxes, r.last);
    r.dtype = static_cast<int16_t>(read.dtype);
    r.guarded = read.guarded ? 1 : 0;
    r.never = read.never ? 1 : 0;
    r.part_begin = static_cast<int16_t>(parts);
    for (const BoundRead::Part& part : read.parts) {
      if (parts == kChainParts) return false;
      ChainPartParams& to = p.part[parts++];
      to.constant = part.index.constant;
      to.divisor = part.index.divisor;
      to.stride = part.stride;
      to.modulo = part.index.kind == ChainIndex::Kind::kModulo ? 1 : 0;
      std::copy_n(part.index.coefficient, kChainMostAxes, to.coefficient);
    }
    r.part_end = static_cast<int16_t>(parts);
  }
  // A reduction of level l is found in pass l - 1; only those that an output is made of.
  std::vector<uint8_t> used(chain.nodes.size(), 0);
  for (const ChainOutput& output : chain.outputs) used[static_cast<size_t>(output.node)] = 1;
  for (size_t i = chain.nodes.size(); i-- > 0;) {
    const ChainNode& node = chain.nodes[i];
    if (used[i] == 0) continue;
    for (int a = 0; a < ArityOf(node.op); ++a) used[static_cast<size_t>(node.arg[a])] = 1;
    if (!IsReduction(node.op)) continue;
    ChainReductionParams& r = p.reduction[p.reductions++];
    r.node = static_cast<int16_t>(i);
    r.arg = static_cast<int16_t>(node.arg[0]);
    r.phase = static_cast<int16_t>(node.level - 1);
    r.op = static_cast<int16_t>(node.op);
    Want(chain, node.arg[0], p.wanted[r.phase]);
    p.phases = std::max(p.phases, node.level);
  }
  for (size_t i = 0; i < chain.outputs.size(); ++i) {
    const ChainOutput& output = chain.outputs[i];
    ChainOutputParams& o = p.output[i];
    o.data = outputs[i];
    std::copy_n(bound.outputs[i].stride, kChainMostAxes, o.stride);
    o.dtype = static_cast<int16_t>(bound.outputs[i].dtype);
    o.node = static_cast<int16_t>(output.node);
    o.phase = static_cast<int16_t>(chain.nodes[static_cast<size_t>(output.node)].level);
    o.of_row = HasLast(chain, output) ? 0 : 1;
    Want(chain, output.node, p.wanted[o.phase]);
    p.phases = std::max<int32_t>(p.phases, o.phase + 1);
  }
  p.outputs = static_cast<int32_t>(chain.outputs.size());
  p.axes = bound.axes;
  std::copy_n(bound.size, kChainMostAxes, p.size);
  p.rows = bound.rows;
  p.n = bound.n;
  p.row_threads = bound.n <= 512 ? 32 : 256;
  p.pieces = 1;
  if (p.reductions == 0 && p.rows < 4 * sm_count && bound.n > 4096) {
    p.pieces = static_cast<int32_t>(std::min<int64_t>((bound.n + 2047) / 2048, 8 * sm_count));
  }
  return true;
}

}  // namespace cuda
}  // namespace stof
