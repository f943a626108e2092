// SPDX-License-Identifier: Apache-2.0
// Fused chains on the CPU: a bound chain is compiled once for its shapes to a program over fp32 registers, which
// workers run over strips of rows. docs/design/fused-chains.md describes it; the entry points are in
// plugins/core/contract/chain.h.
#ifndef STOF_CPU_CHAIN_CHAIN_H_
#define STOF_CPU_CHAIN_CHAIN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/isa.h"
#include "plugins/core/chain/chain.h"
#include "plugins/core/contract/chain.h"

namespace stof {
namespace cpu {

// Operators of a program beyond those of ChainOp, whose numbers come first.
enum FusedOp : int {
  kFusedMulAdd = kChainOps,  // a * b + c
  kFusedMulSub,              // a * b - c
  kFusedSubMul,              // c - a * b
  kFusedCopy,
  kFusedOps,
};

// Rows of one length, with a stride of its own for each argument, so that tensors need no copy.
struct ChainRows {
  int64_t count = 1;
  int64_t dst = 0, a = 0, b = 0, c = 0;
};

// dst[i] = f(a[i], b[i], c[i]), i < n, in each row. Elements of each may be the same as dst's. One function for each
// set of arguments that are one value instead of n, the same for all rows.
using ChainFunction = void (*)(float* dst, const float* a, const float* b, const float* c, int64_t n,
                               const ChainRows& rows);

// The entry points of one instruction set.
struct ChainKernels {
  ChainFunction function[kFusedOps][8];  // bit i of the second: argument i is one value
  double (*sum)(const float* a, int64_t n);
  double (*dot)(const float* a, const float* b, int64_t n);
  float (*max)(const float* a, int64_t n);  // NaN where one is; -inf of none
  float (*min)(const float* a, int64_t n);
  void (*load)(const void* from, DType dtype, int64_t n, float* to);
  void (*store)(const float* from, DType dtype, int64_t n, void* to);
};

struct ChainStep {
  enum class Kind : uint8_t {
    kCompute,  // dst = op(a, b, c)
    kRead,     // dst = elements of read `which`
    kReadRow,  // dst = one element of read `which` a row
    kIndex,    // dst = index along the row
    kAxis,     // dst = index along axis `which`, one a row
    kExpand,   // dst = a, one a row, for every element of its row
    kReduce,   // into sum `which`: op of a, or of a * b where b is given
    kStore,    // a to output `which`
    kStoreRow,
  };
  Kind kind = Kind::kCompute;
  uint8_t mask = 0;
  int16_t op = 0;
  int16_t which = 0;
  int16_t dst = -1, a = -1, b = -1, c = -1;
};

struct ChainRegister {
  enum class Kind : uint8_t {
    kConstant,  // one value
    kRow,       // one value a row
    kStrip,     // the elements of a strip
    kWhole,     // all elements of the row
    kFixed,     // all elements of the row, the same for all rows
    kOutput,    // the elements of a strip, in the output's own memory where it is dense
  };
  Kind kind = Kind::kStrip;
  float value = 0.0f;
  int output = -1;
  int64_t offset = 0;  // of its memory in a worker's, in floats
};

// Columns begin to end - 1.
struct ChainPiece {
  int64_t begin = 0, end = 0;
  std::vector<ChainStep> element;  // for each strip
};

struct ChainPhase {
  std::vector<ChainStep> row;  // before the elements of the phase
  // All columns in one piece, or, where a select depends on the column, a piece for each of its sides.
  std::vector<ChainPiece> pieces;
};

constexpr int64_t kNoPitch = INT64_MIN;

// Elements of each row of a read or an output, `count` of them from `first` on, that are prefetched one batch ahead.
struct ChainPrefetch {
  bool output = false;
  int which = 0;
  int64_t first = 0, count = 0;
};

struct ChainReduction {
  ChainOp op = ChainOp::kSum;
  int phase = 0;
  int row = -1;  // register of the result
};

struct ChainProgram {
  CpuIsa isa{};
  BoundChain bound;
  std::vector<ChainRegister> registers;
  std::vector<int16_t> moving;   // registers whose address changes with the strip
  std::vector<ChainStep> fixed;  // once for each worker: values that are the same for all rows
  std::vector<ChainPhase> phases;
  std::vector<ChainReduction> reductions;
  std::vector<ChainStep> last;  // rows' values that are outputs
  std::vector<uint8_t> linear;  // of a read: elements of a row have one stride
  // Of a read or an output: elements between neighbouring rows of a run; kNoPitch where these are not the same.
  std::vector<int64_t> read_pitch, output_pitch;
  bool straight = false;  // the offsets of a batch's first row give those of all others
  std::vector<ChainPrefetch> prefetches;
  int64_t steps = 1;     // of a batch
  int64_t run = 1;       // consecutive rows, of which batches are taken
  int batch = 1;         // rows at a time; more than 1 only where a row is one strip
  int64_t strip = 1;     // elements of a row at a time
  bool columns = false;  // pieces of rows may go to different workers
  double cost = 1.0;     // of an element, in simple operations
  int64_t floats = 0;    // of a worker's memory
};

// Plans the prefetches of a compiled program: `prefetches` and `steps`.
void PlanPrefetches(ChainProgram* program);
void CompileChain(const Chain& chain, const BoundChain& bound, int threads, ChainProgram* program);

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_CHAIN_H_
