// SPDX-License-Identifier: Apache-2.0
// The pages of a KV cache that the queries of a step attend, and which of these may be left out. Shared by the kernels
// and the host's tests.
#ifndef STOF_CUDA_CHOOSE_PAGES_PAGE_RANGE_H_
#define STOF_CUDA_CHOOSE_PAGES_PAGE_RANGE_H_

#include <cstdint>

#include "cuda/common/host_device.h"

namespace stof {
namespace cuda {

// Pages [begin, end) have a key that some query attends. Of these, page 0 and [recent, end) are always attended; the
// candidates are [CandidatesBegin(), recent).
struct PageRange {
  int32_t begin = 0, recent = 0, end = 0;

  STOF_HD int32_t CandidatesBegin() const { return begin == 0 && recent > 0 ? 1 : begin; }
  STOF_HD int32_t Candidates() const { return recent - CandidatesBegin(); }
  // Pages that are attended where at most `most` candidates are chosen.
  STOF_HD int32_t Attended(int32_t most) const {
    const int32_t left_out = Candidates() - most;
    return end - begin - (left_out > 0 ? left_out : 0);
  }
};

// The most pages that are always attended: page 0, that of the first new row, the one before it, and a second one with
// new rows. A step has no more rows than a page.
constexpr int32_t kAlwaysAttended = 4;

// The pages of a step of S queries, the first of which is at row `first_row` of T keys, and attends `window_left` keys
// before it. Pages have 2^shift rows.
STOF_HD inline PageRange MakePageRange(int32_t first_row, int32_t S, int32_t T, int32_t window_left, int32_t shift) {
  const int32_t first = first_row < 0 ? 0 : first_row > T ? T : first_row;
  const int32_t keys = T - first < S ? T : first + S, low = first - window_left;
  PageRange range;
  range.begin = low <= 0 ? 0 : low >> shift;
  range.end = (keys + (1 << shift) - 1) >> shift;
  range.recent = (first >> shift) - 1;
  if (range.end < range.begin) range.end = range.begin;
  if (range.recent < range.begin) range.recent = range.begin;
  return range;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_PAGE_RANGE_H_
