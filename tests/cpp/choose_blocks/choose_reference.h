// SPDX-License-Identifier: Apache-2.0
// Choose blocks by its definition in docs/reference/operators.md, in double precision. Blocks whose estimates lie so
// near the threshold that rounding decides are uncertain: a kernel may choose them or not.
#ifndef STOF_TESTS_CPP_CHOOSE_BLOCKS_CHOOSE_REFERENCE_H_
#define STOF_TESTS_CPP_CHOOSE_BLOCKS_CHOOSE_REFERENCE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "tests/cpp/attention/reference.h"

namespace stof::test::attention {

struct ChooseProblem {
  const Dense* dense = nullptr;   // its `allowed` has mask and padding
  DType dtype = DType::kF32;      // of the query
  double threshold = 0;           // above 0
  std::vector<uint8_t> fixed;     // [B, H, S, T]: the pairs of existing keys that the static mask allows
  const uint8_t* pad = nullptr;   // [B, T]; nullptr: none
  std::vector<int64_t> ends;      // [B], the numbers of keys
  std::vector<int64_t> diagonal;  // [B], the key at the position of query 0
  int64_t m = 128;                // rows of a tile, by which pairs are counted
  // Whether a kernel's mask lists a key block, which then may be a candidate though the mask allows no pair of it.
  std::function<bool(int64_t b, int64_t h, int64_t query_block, int64_t key_block)> is_listed;
};

struct BlockSets {
  uint64_t scored = 0, skipped = 0, uncertain = 0;  // pairs of rows and keys of tiles; uncertain ones are not skipped
  std::vector<uint8_t> kept;                        // [B, H, S, T]: the allowed pairs without those left out
  std::vector<uint8_t> is_uncertain;                // [B, H, S]: rows of a query block with an uncertain key block
};
BlockSets ChooseKeyBlocks(const ChooseProblem& problem);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_CHOOSE_BLOCKS_CHOOSE_REFERENCE_H_
