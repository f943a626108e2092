// SPDX-License-Identifier: Apache-2.0
// Random chains with inputs that they may read.
#ifndef STOF_TESTS_CPP_CHAIN_CHAIN_RANDOM_H_
#define STOF_TESTS_CPP_CHAIN_CHAIN_RANDOM_H_

#include <string>
#include <vector>

#include "tests/cpp/chain/chain_reference.h"
#include "tests/cpp/check.h"

namespace stof::test {

struct RandomChain {
  std::string text;
  std::vector<ChainArray> inputs;
};

// n: the length of the row; rows stay below about `most_rows`.
RandomChain MakeRandomChain(Random* random, int64_t n, int64_t most_rows);
// Values that dtype holds, mostly within [-4, 4].
void FillChainArray(Random* random, ChainArray* array);

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_CHAIN_CHAIN_RANDOM_H_
