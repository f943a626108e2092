// SPDX-License-Identifier: Apache-2.0
// The range of keys of the decode kernels, key by key.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/decode/key_range.h"
#include "cuda/mask/device_columns.h"
#include "plugins/core/mask/columns/key_columns.h"
#include "tests/cpp/check.h"

namespace stof::test {
namespace {

bool IsAttended(int64_t first, int64_t left, int64_t query, int64_t key, int64_t block = 1) {
  const int64_t position = first + query;
  return key <= position && key >= position - (position > 0 ? position % block : 0) - left;
}

TEST(KeyRangeEqualsItsDefinition) {
  Random random(5);
  for (int i = 0; i < Cases(3000); ++i) {
    const auto T = static_cast<int32_t>(random.Range(1, 700)), S = static_cast<int32_t>(random.Range(1, 16));
    const auto first = static_cast<int32_t>(random.Range(-80, T + 80));
    const int32_t left = random.OneIn(3) ? cuda::kNoWindow : static_cast<int32_t>(random.Range(0, 300));
    const int32_t block = random.OneIn(2) ? 1 : static_cast<int32_t>(random.Range(1, 130));
    const auto where = [&] { return Text("T ", T, " S ", S, " first ", first, " left ", left, " block ", block); };
    const cuda::KeyRange range = cuda::MakeKeyRange(first, left, T, block);
    int32_t begin = -1, end = -1;
    cuda::FindTiles(range, S, T, &begin, &end);
    const int32_t tiles = (T + cuda::kTileKeys - 1) / cuda::kTileKeys;
    CHECK(0 <= begin && begin <= end && end <= tiles, where());
    CHECK(end - begin <= cuda::MostTiles(left == cuda::kNoWindow ? -1 : left, S, T, block), where());
    const int32_t behind = cuda::EndOfKeys(range, S, T);
    CHECK(behind == std::clamp(first + S, 0, T), where());
    for (int32_t tile = 0; tile < tiles; ++tile) {
      bool is_full = true;
      for (int32_t query = 0; query < S; ++query) {
        for (int32_t key = tile * cuda::kTileKeys; key < (tile + 1) * cuda::kTileKeys; key += 32) {
          const uint32_t bits = cuda::BitsOfKeys(range, query, key);
          for (int32_t k = 0; k < 32; ++k) {
            const bool wanted = IsAttended(first, left, query, key + k, block);
            CHECK(((bits >> k & 1u) != 0) == wanted, where(), " query ", query, " key ", key + k);
            is_full = is_full && wanted;
            CHECK(!wanted || key + k >= T || (begin <= tile && tile < end && key + k < behind), where());
          }
        }
      }
      CHECK(cuda::IsFullTile(range, S, tile) == is_full, where(), " tile ", tile);
    }
    CountCases(1);
  }
}

// A first row that no kernel should get makes no arithmetic overflow.
TEST(KeyRangeTakesAnyFirstRow) {
  constexpr int32_t kLongest = 1 << 22;
  for (const int32_t first : {std::numeric_limits<int32_t>::min(), -1, kLongest, std::numeric_limits<int32_t>::max()}) {
    for (const int32_t left : {0, 1023, cuda::kNoWindow}) {
      const cuda::KeyRange range = cuda::MakeKeyRange(first, left, kLongest);
      int32_t begin = -1, end = -1;
      cuda::FindTiles(range, 16, kLongest, &begin, &end);
      CHECK(0 <= begin && begin <= end && end <= kLongest / cuda::kTileKeys, first, " ", left);
      CHECK(first >= 0 || end == (first == -1 ? 1 : 0), first, " ", left, ": ", end);
      const uint32_t bits = cuda::BitsOfKeys(range, 15, 0);
      for (int32_t k = 0; k < 32; ++k)
        CHECK((bits >> k & 1u) == (IsAttended(first, left, 15, k) ? 1u : 0u), first, " ", left, " ", k);
      CountCases(1);
    }
  }
}

// Entries of columns and range, walked as the kernels do: each key that a query attends is met once, and no other key
// of a group is read as a column.
TEST(KeyColumnsBesideARange) {
  const int count = Cases(300);
  Random random(47);
  const std::vector<std::string> kColumns = {"k % 37 == h", "k // 64 % 4 == h", "k // 48 % 3 == h", "k < 5",
                                             "k % 700 < 100"};
  for (int i = 0; i < count; ++i) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(random.Pick(kColumns), {}, &expr).ok());
    const int32_t T = static_cast<int32_t>(random.Range(1, 900)), S = static_cast<int32_t>(random.Range(1, 16));
    std::shared_ptr<const KeyColumns> columns;
    CHECK(KeyColumns::Make(expr, 2, 2, T + random.Range(0, 300), &columns).ok() && columns != nullptr);
    const cuda::ColumnImage image = cuda::MakeColumnImage(*columns);
    const auto list = random.Range(0, image.view.lists - 1);
    const std::vector<int32_t>& keys = columns->keys(list);
    const cuda::KeyRange range =
        cuda::MakeKeyRange(static_cast<int32_t>(random.Range(-5, T)), static_cast<int32_t>(random.Range(0, 200)), T);
    int32_t begin = 0, end = 0;
    cuda::FindTiles(range, S, T, &begin, &end);
    const bool gathers = image.view.gathers != 0;
    const int32_t below = image.below[static_cast<size_t>(list * (image.view.tiles + 1) + begin)];
    const cuda::ColumnEntries entries = cuda::MakeColumnEntries(below, gathers, begin);
    const auto word = [&](int32_t tile, int32_t half) {
      return image.words[static_cast<size_t>((list * image.view.tiles + tile) * 2 + half)];
    };
    const auto at = [&](int64_t entry) { return image.list[static_cast<size_t>(list * image.view.stride + entry)]; };
    for (int32_t query = 0; query < S; ++query) {
      std::vector<int> met(static_cast<size_t>(T), 0);
      for (int32_t entry = 0; entry < entries.tiles; ++entry) {
        for (int32_t place = 0; place < 64; ++place) {
          const uint32_t bits =
              gathers ? cuda::BitsOfColumns(entries, entry, place / 32 * 32) : word(at(entry), place / 32);
          if ((bits >> (place % 32) & 1u) == 0) continue;
          const int32_t key = gathers ? at(64 * entry + place) : 64 * at(entry) + place;
          CHECK(key >= 0 && key < T, key);
          ++met[static_cast<size_t>(key)];
        }
      }
      for (int32_t tile = begin; tile < end; ++tile) {
        for (int32_t key = 64 * tile; key < std::min(64 * tile + 64, cuda::EndOfKeys(range, S, T)); ++key) {
          const int32_t first = key / 32 * 32;
          uint32_t bits = ~0u;
          if (!cuda::IsFullTile(range, S, tile)) {
            bits = cuda::BitsOfKeys(range, query, first) |
                   (word(tile, key / 32 % 2) & cuda::BitsUpToQuery(range, query, first));
          }
          met[static_cast<size_t>(key)] += static_cast<int>(bits >> (key % 32) & 1u);
        }
      }
      for (int32_t key = 0; key < T; ++key) {
        const int32_t distance = range.first + query - key;
        const bool is_column = std::binary_search(keys.begin(), keys.end(), key);
        const bool is_attended = distance >= 0 && (distance <= range.window_left || is_column);
        CHECK(met[static_cast<size_t>(key)] == (is_attended ? 1 : 0), expr.Print(), " T ", T, " first ", range.first,
              " window ", range.window_left, " query ", query, " key ", key, ": ", met[static_cast<size_t>(key)]);
      }
    }
  }
  CountCases(count);
}

}  // namespace
}  // namespace stof::test
