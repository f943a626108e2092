// SPDX-License-Identifier: Apache-2.0
// Mask expressions as CUDA kernels evaluate them, compiled on the host to two postfix programs. The number program
// (number_program.h) has all of the expression. The bit program (bit_program.h) has its boolean part, 32 keys at a
// time, and runs pieces of the number program for what it has no step for.
#ifndef STOF_CUDA_MASK_PROGRAM_MASK_PROGRAM_H_
#define STOF_CUDA_MASK_PROGRAM_MASK_PROGRAM_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/mask/expr_affine.h"
#include "plugins/core/mask/expr_operate.h"
#include "plugins/core/mask/interval.h"

namespace stof {
namespace cuda {

// A step of the number program, whose affine parts are folded. Operands come from a stack, whose top is what was pushed
// last; of two the left one was pushed first.
struct NumberStep {
  enum Mode : uint8_t {
    kStack,
    kImmediate,  // the right one is the constant of affine `arg`
    kShift,      // // and % by 2^arg
    kSame,       // kLookup: of the same element for all queries
  };
  ExprOp op = ExprOp::kConst;  // kConst: push affine `arg`
  uint8_t mode = kStack;
  uint8_t operand = 0;  // kLookup: which
  uint8_t places = 0;   // kLookup: two bits an axis, how far its index is from the lowest of the indices on the stack
  int32_t arg = 0;      // kLookup: the number of axes, 1 also where one index counts all elements
};

// A step of the bit program: a word of 32 keys for each query. Operands come from a stack as above.
struct BitStep {
  enum Kind : uint8_t {
    kAnd,
    kOr,
    kNot,
    kRange,   // affine + sign * row side is at least `constant`, where that bounds it, and below `limit`; or not that
    kLinear,  // affine - row side `op` constant
    kAbs,     // abs(affine) `op` constant, which is not negative
    kMod,     // affine % limit `op` constant; the affine's factor of k is 1
    kOuter,   // row side `op` key side
    kKeys,    // key side is not 0
    kBytes,   // number steps `first`, a look-up of bytes that lie in the order of keys, are not 0
    kPairs,   // number steps `first` are not 0: of every pair by itself
  };
  Kind kind = kAnd;
  ExprOp op = ExprOp::kNe;  // a comparison
  int8_t row = -1, key = -1;
  int8_t sign = 0;                         // kRange: 0 without a side
  bool bounded = false, inverted = false;  // kRange
  bool small = false;                      // 32 bits are enough for the affine beside its constants
  uint16_t first = 0, count = 0;           // of number steps
  int32_t affine = -1;
  int64_t constant = 0, limit = 0;
  uint64_t pattern = 0;  // kMod up to 32: whether it holds where the affine is i; of all i < 64
};

// Number steps whose value depends on the query alone or on the key alone.
struct MaskSide {
  int32_t first = 0, count = 0;
  int32_t keys = 0;  // 1: of the key
};

// A vector or table in memory. Summaries: minimum and maximum of every 32 elements, then of every 1024, in `summaries`
// of the evaluator, from pair number `blocks` and `groups` on; blocks -1: there are none.
struct MaskOperand {
  static constexpr int kBlock = 32, kGroup = 1024;
  const void* data = nullptr;
  int32_t dims[4] = {};
  int32_t count = 0;  // of elements
  int32_t blocks = -1, groups = -1;
  DType dtype = DType::kUndefined;
  int32_t boolean = 0;
  int64_t lo = 0, hi = 0;  // no element lies beyond; exact where there are no summaries
};

// Queries and keys, inclusive, of one batch and head.
struct MaskBox {
  int64_t b = 0, h = 0, q_lo = 0, q_hi = 0, k_lo = 0, k_hi = 0;
};

constexpr int kMaskStack = 24;     // a program that needs more is refused
constexpr int kMostOperands = 16;  // vectors and tables of a program
constexpr int kMostSides = 8;

// A program in the memory of its evaluator.
struct MaskView {
  const NumberStep* steps = nullptr;
  const Affine* affines = nullptr;
  const MaskOperand* operands = nullptr;
  const int64_t* summaries = nullptr;
  const BitStep* bit_steps = nullptr;
  const MaskSide* sides = nullptr;
  int32_t count = 0;  // of steps
  int32_t bit_steps_count = 0;
  int32_t narrow = 1;  // every immediate fits 32 bits
};

// A run-time vector or a table, with its data where the program will be evaluated.
using MaskInputs = std::vector<std::pair<std::string, Tensor>>;

struct MaskProgram {
  std::vector<NumberStep> steps;
  std::vector<Affine> affines;
  std::vector<MaskOperand> operands;
  std::vector<BitStep> bit_steps;
  std::vector<MaskSide> sides;
  bool by_intervals = false;  // some bit step is decided by MaskIntervals
  bool by_pairs = false;      // some bit step is kPairs
  int32_t pairs = 0;          // of summaries
  bool narrow = true;
  // Whether no value can leave ±2^61 and no index its table, whatever the vectors hold. Else intervals decide it box by
  // box.
  bool proven = true;
  bool uses_b = false, uses_h = false;
  // Whether the mask of a batch and head depends on the distance from query to key alone, and intervals are isotone:
  // what is decided for a box is decided for every smaller one in it. (They are not where a look-up has several axes,
  // for a box of few elements is read, and a smaller one of more of them in a row may be looked up in summaries.)
  bool diagonal = false;
};

// The conjunction of the expressions, either of which may be empty, for these sizes. Errors: what no vectors could make
// right, an operand that is missing or of the wrong rank or type, an expression that needs too deep a stack.
Status CompileMask(const MaskExpr& fixed, const MaskExpr& dynamic, const ExprSizes& sizes, const MaskInputs& inputs,
                   MaskProgram* program);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_PROGRAM_MASK_PROGRAM_H_
