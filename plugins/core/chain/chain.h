// SPDX-License-Identifier: Apache-2.0
// Descriptions of fused chains: docs/reference/chain-format.md is the contract. The text comes from untrusted files.
#ifndef STOF_PLUGINS_CORE_CHAIN_CHAIN_H_
#define STOF_PLUGINS_CORE_CHAIN_CHAIN_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

constexpr int kChainMostAxes = 6;
constexpr int kChainMostInputs = 16;
constexpr int kChainMostOutputs = 8;
constexpr int kChainMostNodes = 256;
constexpr int kChainMostDepth = 64;
constexpr int kChainMostReductions = 16;
constexpr size_t kChainMostText = 16 << 10;
constexpr int64_t kChainMostInteger = int64_t{1} << 31;
// Limits of a run: positions for each element that it reads or writes, or values altogether.
constexpr int64_t kChainMostPositions = 4;
constexpr int64_t kChainMostWork = int64_t{1} << 30;

enum class ChainOp : uint8_t {
  kConstant,
  kAxis,
  kRead,
  // of one value
  kNeg,
  kAbs,
  kExp,
  kLog,
  kSqrt,
  kRsqrt,
  kReciprocal,
  kTanh,
  kErf,
  kSigmoid,
  kSoftplus,
  kSin,
  kCos,
  kFloor,
  kCeil,
  kRound,
  kRelu,
  kSilu,
  kGelu,
  kGeluTanh,
  kRoundF16,
  kRoundBf16,
  // of two
  kAdd,
  kSub,
  kMul,
  kDiv,
  kMin,
  kMax,
  kPow,
  kLt,
  kLe,
  kGt,
  kGe,
  kEq,
  kNe,
  // of three
  kSelect,
  // of a row
  kSum,
  kMean,
  kMaxOf,
  kMinOf,
};
constexpr int kChainOps = static_cast<int>(ChainOp::kMinOf) + 1;
constexpr bool IsReduction(ChainOp op) { return op >= ChainOp::kSum; }
constexpr int ArityOf(ChainOp op) {
  if (op <= ChainOp::kRead) return 0;
  if (op < ChainOp::kAdd || op >= ChainOp::kSum) return 1;
  return op == ChainOp::kSelect ? 3 : 2;
}

// constant + sum of coefficient * axis, then "% divisor" or "// divisor" of it, both rounding down.
struct ChainIndex {
  enum class Kind : uint8_t { kPlain, kModulo, kQuotient };
  Kind kind = Kind::kPlain;
  int64_t divisor = 1;
  int64_t constant = 0;
  int64_t coefficient[kChainMostAxes] = {};
};

struct ChainRead {
  int input = 0;
  int line = 0;
  std::vector<ChainIndex> index;  // a dimension each
};

struct ChainNode {
  ChainOp op = ChainOp::kConstant;
  int arg[3] = {-1, -1, -1};
  float value = 0.0f;  // kConstant
  int which = 0;       // kAxis: the axis; kRead: the place in Chain::reads
  int level = 0;       // how many reductions are below it, one inside the other, itself included
  uint32_t axes = 0;   // a bit for each axis that it depends on
};

struct ChainAxis {
  std::string name;
  int64_t value = 0;  // where input is negative
  int input = -1;
  int dim = 0;
  int64_t over = 1;
};

struct ChainOutput {
  DType type = DType::kF32;
  int node = 0;
  int line = 0;
  std::vector<std::vector<int>> dims;  // axes merged into each dimension, outermost first; none: 1
};

// Nodes follow their arguments, and no two are equal: common subexpressions are one node. The last axis is the row.
struct Chain {
  std::vector<ChainAxis> axes;
  std::vector<ChainNode> nodes;
  std::vector<ChainRead> reads;
  std::vector<ChainOutput> outputs;
  int inputs = 0;  // one more than the highest that is named

  int last() const { return static_cast<int>(axes.size()) - 1; }
  bool VariesAlongRow(int node) const { return (nodes[static_cast<size_t>(node)].axes >> last() & 1) != 0; }
};

// Errors name the line, what was found and what was expected.
Status ParseChain(std::string_view text, Chain* chain);

// ---- a chain with the shapes of one run ----

// Elements from an input's begin: constant + sum of stride * axis + sum of the parts.
struct BoundRead {
  struct Part {
    ChainIndex index;
    int64_t stride = 0;
  };
  int input = 0;
  DType dtype = DType::kF32;
  int64_t constant = 0;
  int64_t stride[kChainMostAxes] = {};
  std::vector<Part> parts;
  // The positions that are read, both ends included; a select takes its other side at all others.
  int64_t first[kChainMostAxes] = {};
  int64_t last[kChainMostAxes] = {};
  bool guarded = false;  // first and last leave something out
  bool never = false;    // no position reads it
};

struct BoundOutput {
  DType dtype = DType::kF32;
  int rank = 0;
  int64_t dims[kMaxRank] = {};
  int64_t stride[kChainMostAxes] = {};  // elements between neighbours along each axis
};

struct BoundChain {
  int axes = 0;
  int64_t size[kChainMostAxes] = {};
  int64_t rows = 1;  // of all axes but the last
  int64_t n = 1;     // the row
  std::vector<BoundRead> reads;
  std::vector<BoundOutput> outputs;
};

// Checks types and ranks, proves that every index is in range, bounds the work, and gives sizes and strides. Data are
// not looked at.
Status BindChain(const Chain& chain, const Tensor* inputs, int input_count, BoundChain* bound);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CHAIN_CHAIN_H_
