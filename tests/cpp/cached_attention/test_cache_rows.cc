// SPDX-License-Identifier: Apache-2.0
// The rows of a cache that the CUDA kernel reads and writes, against a cache that takes tokens one by one.
#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/cached_attention/cache_rows.h"
#include "tests/cpp/cached_attention/append_problem.h"
#include "tests/cpp/check.h"

namespace stof::test::cached_attention {
namespace {

cuda::CacheShape DrawShape(Random* random) {
  cuda::CacheShape shape;
  shape.S = random->Pick(std::vector<int64_t>{1, 1, 3, 16, 40});
  shape.capacity = random->Range(1, 80);
  if (random->OneIn(2)) shape.sliding_window = random->Range(1, shape.capacity);
  if (shape.sliding_window == 0) shape.capacity += shape.S;
  shape.past_capacity =
      shape.sliding_window > 0 || random->OneIn(2) ? shape.capacity : random->Range(0, shape.capacity);
  shape.is_first_prompt = random->OneIn(4);
  return shape;
}

std::string Describe(const cuda::CacheShape& shape, int32_t seqlen) {
  return Text("S ", shape.S, " past capacity ", shape.past_capacity, " capacity ", shape.capacity, " window ",
              shape.sliding_window, " first ", shape.is_first_prompt, " seqlen ", seqlen);
}

TEST(CacheRowsEqualACacheOfSingleTokens) {
  Random random(6);
  for (int i = 0; i < Cases(4000); ++i) {
    const cuda::CacheShape shape = DrawShape(&random);
    const auto seqlen = static_cast<int32_t>(shape.is_first_prompt ? random.Range(0, shape.S - 1)
                                                                   : random.Range(shape.S - 1, shape.S + 150));
    const std::string where = Describe(shape, seqlen);
    const int64_t total = seqlen + 1, past = shape.is_first_prompt ? 0 : total - shape.S;
    Case c;
    c.window = shape.sliding_window, c.capacity = shape.capacity;
    const std::vector<int64_t> before = Held(c, past), after = Held(c, total);
    const cuda::CacheRows rows = cuda::FindCacheRows(shape, seqlen);
    const bool fits = shape.sliding_window > 0 || past + shape.S <= shape.capacity;
    CHECK(rows.is_invalid == (!fits || static_cast<int64_t>(before.size()) > shape.past_capacity), where);
    CountCases(1);
    if (rows.is_invalid) continue;
    CHECK(rows.past == past && rows.tokens == total - past && rows.held == static_cast<int64_t>(before.size()), where);
    const int64_t origin = after.empty() ? 0 : after[0];
    CHECK(rows.first_row == past - origin, where, ": ", rows.first_row);
    const auto kept = std::find(before.begin(), before.end(), origin);
    CHECK(rows.kept_from == kept - before.begin(), where, ": ", rows.kept_from);
    CHECK(rows.kept_from <= rows.held && rows.held - rows.kept_from <= shape.capacity, where);
  }
}

TEST(CacheRowsOfIllegalLengthsStayInBounds) {
  Random random(7);
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min(), kMost = std::numeric_limits<int32_t>::max();
  for (int i = 0; i < Cases(1000); ++i) {
    const cuda::CacheShape shape = DrawShape(&random);
    const auto near = static_cast<int32_t>(random.Range(-3, shape.capacity + 3));
    for (const int32_t seqlen : {kLeast, kLeast + 1, -2, -1, near, kMost - 1, kMost}) {
      const cuda::CacheRows rows = cuda::FindCacheRows(shape, seqlen);
      const std::string where = Describe(shape, seqlen);
      CHECK(seqlen >= 0 || rows.is_invalid, where);
      CHECK(seqlen < shape.S || !shape.is_first_prompt || rows.is_invalid, where);
      CHECK(rows.held >= 0 && rows.held <= shape.past_capacity, where, ": held ", rows.held);
      CHECK(rows.kept_from >= 0 && rows.kept_from <= rows.held, where, ": kept from ", rows.kept_from);
      CHECK(rows.first_row + shape.S <= shape.capacity || shape.sliding_window > 0, where, ": ", rows.first_row);
      CHECK(rows.first_row <= shape.capacity && (rows.first_row >= 0 || shape.sliding_window > 0), where, ": ",
            rows.first_row);
      CountCases(1);
    }
  }
}

}  // namespace
}  // namespace stof::test::cached_attention
