// SPDX-License-Identifier: Apache-2.0
// The selection of the CUDA kernels, compiled for the host: the largest numbers, the first ones among equals.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/choose_pages/select.cuh"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

constexpr int kThreads = 64;
using HostSelection = cuda::Selection<kThreads>;

std::vector<int> Select(const std::vector<uint32_t>& numbers, int wanted, const std::string& where) {
  std::vector<int> selected(static_cast<size_t>(wanted), -1);
  HostSelection::Shared shared;
  bool is_legal = true;
  emulated_sm80::Cta::Run(kThreads, [&] {
    HostSelection selection(numbers.data(), static_cast<int>(numbers.size()), shared);
    const cuda::SelectionCut cut = selection.FindCut(wanted);
    selection.ForEachSelected(cut, [&](int place, int i) {
      if (place < 0 || place >= wanted) {
        is_legal = false;
      } else {
        selected[static_cast<size_t>(place)] = i;
      }
    });
  });
  CHECK(is_legal, where, ": a place beyond those wanted");
  return selected;
}

// Sorted by number, then by index.
std::vector<int> Define(const std::vector<uint32_t>& numbers, int wanted) {
  std::vector<int> all(numbers.size());
  std::iota(all.begin(), all.end(), 0);
  std::stable_sort(all.begin(), all.end(),
                   [&](int i, int j) { return numbers[static_cast<size_t>(i)] > numbers[static_cast<size_t>(j)]; });
  all.resize(static_cast<size_t>(wanted));
  std::sort(all.begin(), all.end());
  return all;
}

TEST(PageSelectionEqualsItsDefinition) {
  Random random(77);
  for (int i = 0; i < Cases(60); ++i) {
    const auto count = static_cast<int>(random.Range(2, random.OneIn(3) ? 5000 : 300));
    const auto wanted =
        static_cast<int>(random.OneIn(4) ? (random.OneIn(2) ? 1 : count - 1) : random.Range(1, count - 1));
    const auto kind = static_cast<int>(random.Range(0, 4));
    std::vector<uint32_t> numbers;
    const auto base = static_cast<uint32_t>(random.Next() >> 33) + 1u;
    for (int n = 0; n < count; ++n) {
      const auto drawn = static_cast<uint32_t>(random.Next() >> 32);
      numbers.push_back(kind == 0   ? std::max(drawn, 1u)                            // all that there are
                        : kind == 1 ? base + drawn % 7                               // many equal ones
                        : kind == 2 ? base                                           // all equal
                        : kind == 3 ? (drawn % 50 == 0 ? ~0u : base + drawn % 4096)  // far apart
                                    : 1u + (drawn >> drawn % 32));                   // of many sizes
    }
    const std::string where = Text("case ", i, ", kind ", kind, ", ", wanted, " of ", count);
    CHECK(Select(numbers, wanted, where) == Define(numbers, wanted), where);
    CountCases(1);
  }
}

}  // namespace
}  // namespace stof::test
