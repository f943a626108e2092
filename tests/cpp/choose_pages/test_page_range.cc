// SPDX-License-Identifier: Apache-2.0
// The pages that the CUDA kernels choose among, page by page.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/choose_pages/choose.h"
#include "plugins/core/contract/page_choice.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

TEST(PageRangeEqualsItsDefinition) {
  Random random(31);
  for (int i = 0; i < Cases(4000); ++i) {
    const auto shift = static_cast<int32_t>(random.Range(4, 7)), rows = 1 << shift;
    const auto S = static_cast<int32_t>(random.Range(1, 16)), T = static_cast<int32_t>(random.Range(S, 3000));
    const auto first = static_cast<int32_t>(random.Range(0, T - S));
    const int32_t left = random.OneIn(2) ? 1 << 28 : static_cast<int32_t>(random.Range(0, T));
    const auto most = static_cast<int32_t>(random.Range(0, 20));
    const auto where = [&] { return Text("rows ", rows, " S ", S, " T ", T, " first ", first, " left ", left); };
    CHECK(cuda::PageShift(rows) == shift, where());
    const cuda::PageRange range = cuda::MakePageRange(first, S, T, left, shift);
    int64_t candidates = 0, allowed = 0;
    for (int32_t page = 0; page < cuda::CountPages(T, rows); ++page) {
      // A page is allowed where some query attends one of its keys.
      bool is_allowed = false;
      for (int32_t query = first; query < first + S; ++query) {
        is_allowed = is_allowed || (page * rows <= query && (page + 1) * rows > query - left);
      }
      const bool is_recent = page >= FirstRecentPage(rows, first);
      CHECK(is_allowed == (range.begin <= page && page < range.end), where(), " page ", page);
      const bool is_candidate = is_allowed && page != 0 && !is_recent;
      CHECK(is_candidate == (range.CandidatesBegin() <= page && page < range.recent), where(), " page ", page);
      candidates += is_candidate ? 1 : 0, allowed += is_allowed ? 1 : 0;
    }
    CHECK(range.Candidates() == candidates, where());
    const int64_t attended = allowed - candidates + std::min<int64_t>(candidates, most);
    CHECK(range.Attended(most) == attended, where(), " at most ", most);
    CHECK(attended <= cuda::ListColumns(most, cuda::CountPages(T, rows)), where(), " at most ", most);
    CountCases(1);
  }
}

// A first row that no kernel should get makes no access beyond the pages.
TEST(PageRangeTakesAnyFirstRow) {
  constexpr int32_t kLongest = 1 << 22;
  for (const int32_t first : {std::numeric_limits<int32_t>::min() + kLongest, -1, 0, kLongest, kLongest + 5}) {
    for (const int32_t T : {1, 64, kLongest}) {
      for (const int32_t left : {0, 100, 1 << 28}) {
        const cuda::PageRange range = cuda::MakePageRange(first, 16, T, left, 6);
        CHECK(0 <= range.begin && range.begin <= range.recent && range.begin <= range.end, first, " of ", T);
        CHECK(range.end <= cuda::CountPages(T, 64) && range.Candidates() >= 0, first, " of ", T);
        CountCases(1);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test
