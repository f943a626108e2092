// SPDX-License-Identifier: Apache-2.0
// The range of keys of the decode kernels, key by key.
#include <algorithm>
#include <limits>
#include <vector>

#include "cuda/attention/decode/key_range.h"
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

}  // namespace
}  // namespace stof::test
