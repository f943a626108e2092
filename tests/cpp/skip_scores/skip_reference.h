// SPDX-License-Identifier: Apache-2.0
// Skip by score by its definition in docs/reference/operators.md, in double precision, for the groups of rows, the key
// tiles and the order of them that the CPU kernels have.
#ifndef STOF_TESTS_CPP_SKIP_SCORES_SKIP_REFERENCE_H_
#define STOF_TESTS_CPP_SKIP_SCORES_SKIP_REFERENCE_H_

#include <cstdint>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "tests/cpp/attention/reference.h"

namespace stof::test::attention {

struct SkipChoice {
  uint64_t scored = 0, skipped = 0;  // pairs: rows times keys of groups of rows and key tiles
  // Pairs of groups and tiles whose scores lie so near the threshold that rounding decides, or follow a NaN of the
  // group, which a kernel's maxima may lose. Not in `skipped`.
  uint64_t uncertain = 0;
  std::vector<uint8_t> kept;          // [B, H, S, T]: the allowed pairs without the skipped ones
  std::vector<uint8_t> is_uncertain;  // [B, H, S]: rows of a group and tile that rounding decides about
};
// args: bound, with its mask and its threshold.
SkipChoice ChooseTiles(const Dense& problem, const AttentionArgs& args, const CpuAttentionConfig& config, int threads);

}  // namespace stof::test::attention
#endif  // STOF_TESTS_CPP_SKIP_SCORES_SKIP_REFERENCE_H_
