// SPDX-License-Identifier: Apache-2.0
// The index arithmetic of the CUDA kernels of a paged cache, on the host: legal batches against plain loops, hostile
// ones for staying in bounds.
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda/paged_attention/token_rows.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

using cuda::PagedShape;

TEST(PagedTokenRowsOfLegalBatches) {
  Random random(3);
  for (int run = 0; run < Cases(300); ++run) {
    PagedShape shape;
    shape.B = random.Range(1, 9);
    shape.shift = static_cast<int>(random.Range(4, 8));
    shape.columns = random.Range(1, 7), shape.pages = random.Range(1, 30);
    std::vector<int32_t> cumulative = {0}, past, owner;
    for (int64_t b = 0; b < shape.B; ++b) {
      const int64_t tokens = random.OneIn(3) ? 0 : random.Range(1, 16);
      past.push_back(static_cast<int32_t>(random.Range(0, (shape.columns << shape.shift) - tokens)));
      cumulative.push_back(cumulative.back() + static_cast<int32_t>(tokens));
      for (int64_t i = 0; i < tokens; ++i) owner.push_back(static_cast<int32_t>(b));
    }
    shape.N = static_cast<int64_t>(owner.size()) + random.Range(0, 3);
    shape.most_queries = 16, shape.most_keys = shape.columns << shape.shift;
    for (size_t t = 0; t < owner.size(); ++t) {
      const int64_t b = cuda::FindSequence(cumulative.data(), shape.B, static_cast<int64_t>(t));
      CHECK(b == owner[t], "token ", t, " of sequence ", owner[t], " was given to ", b);
      const auto at = static_cast<size_t>(b);
      const cuda::PagedSequence sequence = cuda::MakePagedSequence(shape, cumulative[at], cumulative[at + 1], past[at]);
      CHECK(!sequence.is_invalid && sequence.begin == cumulative[at] && sequence.past == past[at]);
      CHECK(sequence.tokens == cumulative[at + 1] - cumulative[at]);
    }
    std::vector<int32_t> table;
    for (int64_t i = 0; i < shape.columns; ++i) table.push_back(static_cast<int32_t>(random.Range(-1, shape.pages)));
    for (int64_t position = 0; position < shape.columns << shape.shift; ++position) {
      const int64_t page = table[static_cast<size_t>(position / (int64_t{1} << shape.shift))];
      const int64_t row = cuda::RowOfPosition(shape, table.data(), position);
      const int64_t expected = page < 0 || page >= shape.pages
                                   ? -1
                                   : page * (int64_t{1} << shape.shift) + position % (int64_t{1} << shape.shift);
      CHECK(row == expected, "position ", position, " has row ", row, ", expected ", expected);
    }
    CountCases(1);
  }
}

TEST(PagedTokenRowsStayInBounds) {
  Random random(4);
  const std::vector<int32_t> extremes = {
      std::numeric_limits<int32_t>::min(), -1, 0, 1, 7, 100, std::numeric_limits<int32_t>::max() - 1,
      std::numeric_limits<int32_t>::max()};
  for (int run = 0; run < Cases(2000); ++run) {
    PagedShape shape;
    shape.B = random.Range(1, 6), shape.N = random.Range(0, 120);
    shape.columns = random.Range(0, 5), shape.pages = random.Range(0, 5), shape.shift = 4;
    shape.most_queries = random.Range(0, shape.N), shape.most_keys = random.Range(0, shape.columns << 4);
    std::vector<int32_t> cumulative;
    for (int64_t b = 0; b <= shape.B; ++b) cumulative.push_back(random.Pick(extremes));
    for (int64_t t = 0; t < shape.N; ++t) {
      const int64_t b = cuda::FindSequence(cumulative.data(), shape.B, t);
      CHECK(b >= 0 && b < shape.B, "token ", t, " was given to sequence ", b);
      const auto at = static_cast<size_t>(b);
      const cuda::PagedSequence sequence =
          cuda::MakePagedSequence(shape, cumulative[at], cumulative[at + 1], random.Pick(extremes));
      CHECK(sequence.begin >= 0 && sequence.tokens >= 0 && sequence.begin + sequence.tokens <= shape.N);
      CHECK(sequence.tokens <= shape.most_queries && sequence.past >= 0);
      CHECK(sequence.past + sequence.tokens <= shape.columns << shape.shift);
    }
    CountCases(1);
  }
}

TEST(PagedFirstKeyEqualsThatOfTheContract) {
  PagedAppendArgs args;
  for (const int64_t window_left : {-1, 0, 1, 15, 127, 128, 500}) {
    args.window_left = window_left;
    for (int64_t past = 0; past < 1200; past += 7) {
      CHECK(cuda::FirstPagedKey(window_left, past) == args.FirstKey(past), window_left, " ", past);
    }
  }
}

}  // namespace
}  // namespace stof::test
