// SPDX-License-Identifier: Apache-2.0
// The row-wise cost model: its counts against the expression pair by pair, and its predictions against measurements.
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cuda/attention/rowwise/cost.h"
#include "tests/cpp/fixtures.h"

namespace stof::test {
namespace {

struct Mask {
  const char* text;
  std::function<bool(int64_t b, int64_t h, int64_t q, int64_t k)> allows;
};

TEST(PairsOfAMaskAreCounted) {
  const std::vector<Mask> masks = {
      {"k <= q", [](int64_t, int64_t, int64_t q, int64_t k) { return k <= q; }},
      {"abs(q - k) <= 9", [](int64_t, int64_t, int64_t q, int64_t k) { return std::abs(q - k) <= 9; }},
      {"(q - k) % 37 == 0", [](int64_t, int64_t, int64_t q, int64_t k) { return (q - k) % 37 == 0; }},
      {"h == 1 and k % 5 == 0 or q == k",
       [](int64_t, int64_t h, int64_t q, int64_t k) { return (h == 1 && k % 5 == 0) || q == k; }},
      {"b == 1 or k < 3", [](int64_t b, int64_t, int64_t, int64_t k) { return b == 1 || k < 3; }},
      {"k < 0", [](int64_t, int64_t, int64_t, int64_t) { return false; }},
      {"True", [](int64_t, int64_t, int64_t, int64_t) { return true; }},
  };
  const std::vector<std::pair<int64_t, int64_t>> lengths = {{1, 1}, {63, 65}, {64, 64}, {130, 200}, {200, 70}};
  const std::vector<std::pair<int, int>> tiles = {{64, 64}, {128, 64}, {48, 96}};
  int64_t cases = 0;
  for (const Mask& mask : masks) {
    for (const auto& [S, T] : lengths) {
      for (const auto& [m, n] : tiles) {
        const int64_t columns = (T + n - 1) / n;
        cuda::MaskCounts wanted;
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < 3; ++h) {
            std::vector<bool> kept(static_cast<size_t>((S + m - 1) / m * columns));
            for (int64_t q = 0; q < S; ++q) {
              int64_t keys = 0;
              for (int64_t k = 0; k < T; ++k) {
                if (!mask.allows(b, h, q, k)) continue;
                ++keys;
                kept[static_cast<size_t>(q / m * columns + k / n)] = true;
              }
              wanted.pairs += keys;
              wanted.most_keys = std::max(wanted.most_keys, keys);
            }
            wanted.tiles += std::count(kept.begin(), kept.end(), true);
          }
        }
        const ExprSizes sizes = {2, 3, S, T, 0};
        const cuda::MaskCounts found = cuda::CountPairs(BuiltMask(mask.text, sizes, m, n), 2, 3);
        const std::string where = Text(mask.text, " S ", S, " T ", T, " tile ", m, "x", n);
        CHECK(found.pairs == wanted.pairs, where, ": ", found.pairs, " pairs, expected ", wanted.pairs);
        CHECK(found.tiles == wanted.tiles, where, ": ", found.tiles, " tiles, expected ", wanted.tiles);
        CHECK(found.most_keys == wanted.most_keys, where, ": most keys ", found.most_keys, ", expected ",
              wanted.most_keys);
        ++cases;
      }
    }
  }
  CountCases(cases);
}

// Measured on an H100: which kernel is faster, where the times are not close.
TEST(RowwiseIsChosenWhereKeysAreScattered) {
  struct Known {
    const char* text;
    int64_t H, S;
    int head_bytes;
    bool fp32, rows;
  };
  const std::vector<Known> known = {
      {"(q - k) % 128 == 0", 16, 4096, 256, true, true},
      {"(q - k) % 64 == 0", 16, 4096, 256, true, true},
      {"(q - k) % 16 == 0", 16, 4096, 256, true, false},
      {"abs(q - k) <= 4", 16, 4096, 256, true, false},
      {"(q - k) % 128 == 0", 16, 4096, 128, false, true},
      {"(q - k) % 16 == 0", 16, 4096, 128, false, false},
      {"abs(q - k) <= 4", 16, 4096, 128, false, false},
      {"k <= q", 16, 2048, 128, false, false},
      {"(q - k) % 128 == 0", 32, 8192, 512, true, true},
      {"abs(q - k) <= 32 and (q - k) % 8 == 0", 16, 4096, 128, false, false},
      // One row attends all keys, and one warp computes it.
      {"(q - k) % 512 == 0 or q == 7", 16, 4096, 128, false, false},
  };
  constexpr int kSmCount = 132;
  for (const Known& it : known) {
    const ExprSizes sizes = {1, it.H, it.S, it.S, 0};
    const cuda::MaskCounts tiled = cuda::CountPairs(BuiltMask(it.text, sizes, 128, 64), 1, it.H);
    const cuda::MaskCounts fine = cuda::CountPairs(BuiltMask(it.text, sizes, 64, 64), 1, it.H);
    const double rows = cuda::PredictRowwise(fine, it.H * it.S, it.head_bytes, kSmCount);
    const double tiles = cuda::PredictTiled(tiled, it.head_bytes, it.fp32, kSmCount);
    CHECK((rows < tiles) == it.rows, it.text, " head bytes ", it.head_bytes, ": rows ", rows, " ns, tiles ", tiles);
  }
  CountCases(static_cast<int64_t>(known.size()));
}

}  // namespace
}  // namespace stof::test
