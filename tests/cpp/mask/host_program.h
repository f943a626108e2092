// SPDX-License-Identifier: Apache-2.0
// The mask programs of the device, run on the host by the code that kernels compile.
#ifndef STOF_TESTS_CPP_MASK_HOST_PROGRAM_H_
#define STOF_TESTS_CPP_MASK_HOST_PROGRAM_H_

#include <cstdint>
#include <vector>

#include "cuda/mask/program/bit_program.h"
#include "cuda/mask/program/mask_program.h"
#include "cuda/mask/program/number_program.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {

// The pairs of a box, query by query: 1 where the mask allows one, else 0.
using Pattern = std::vector<uint8_t>;

inline int64_t Queries(const cuda::MaskBox& box) { return box.q_hi - box.q_lo + 1; }
inline int64_t Keys(const cuda::MaskBox& box) { return box.k_hi - box.k_lo + 1; }

// By plain recursion over the expression, pair by pair.
Pattern PatternByDefinition(const RandomMask& mask, const cuda::MaskBox& box);
// Fails at the first pair that differs.
void CheckPattern(const char* evaluator, const Pattern& found, const Pattern& want, const RandomMask& mask,
                  const cuda::MaskBox& box);
// A program takes vectors and tables alike.
cuda::MaskInputs AllInputs(const Operands& operands);

class HostProgram {
 public:
  // last: the last key of the problem. The program must live on.
  HostProgram(const cuda::MaskProgram& program, int64_t last);

  const cuda::MaskView& view() const { return view_; }

  // The number program by value. V as of EvaluateRows.
  template <typename V>
  Pattern ByNumbers(const cuda::MaskBox& box) const;
  // The bit program.
  Pattern ByBits(const cuda::MaskBox& box) const;
  // What the bit program may give in the box.
  template <bool kIntervals>
  cuda::MaskCan Decide(const cuda::MaskBox& box, bool* ok, bool* narrow) const;

 private:
  Interval Extremes(int side, const cuda::MaskBox& box) const;

  std::vector<int64_t> summaries_;
  cuda::MaskView view_;
  int64_t last_;
};

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_MASK_HOST_PROGRAM_H_
