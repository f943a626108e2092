// SPDX-License-Identifier: Apache-2.0
// Chains by their definition in docs/reference/chain-format.md, in double precision and element by element, with a
// bound of the error that fp32 may add. Shares no code with the library: it reads the text itself.
#ifndef STOF_TESTS_CPP_CHAIN_CHAIN_REFERENCE_H_
#define STOF_TESTS_CPP_CHAIN_CHAIN_REFERENCE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/base/types.h"

namespace stof::test {

struct ChainArray {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<double> values;
};

// A value and how far a correct kernel may be from it; an infinite error where no bound is known.
struct Approximate {
  double value = 0;
  double error = 0;
};

struct ChainAnswer {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<Approximate> values;
};

// Throws std::runtime_error on text that it cannot read and on an index out of range.
std::vector<ChainAnswer> EvaluateChain(const std::string& text, const std::vector<ChainArray>& inputs);

// What a kernel may be off in the type of the output.
double ChainTolerance(DType dtype, const Approximate& expected);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_CHAIN_CHAIN_REFERENCE_H_
