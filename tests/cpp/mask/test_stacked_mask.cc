// SPDX-License-Identifier: Apache-2.0
// Masks by head whose rows are stacked, against the definition of their expression.
#include <algorithm>
#include <set>

#include "cuda/mask/stacked_mask.h"
#include "plugins/core/mask/block_mask_builder.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

constexpr int32_t kRows = 64, kKeys = 64;

int64_t Longest(const BlockMask& mask) {
  int64_t longest = 0;
  for (size_t row = 0; row + 1 < mask.row_ptr.size(); ++row) {
    longest = std::max<int64_t>(longest, mask.row_ptr[row + 1] - mask.row_ptr[row]);
  }
  return longest;
}

// Every bit of every tile, that empty tiles are not there, and full ones where they have to be.
void CheckStacked(const BlockMask& mask, int64_t group, const RandomMask& random, const std::string& where) {
  const ExprSizes& sizes = random.sizes;
  CHECK(mask.rows == 1 && mask.S == sizes.S * group && mask.layout_h == sizes.H / group, where);
  CHECK(mask.layout.size() == static_cast<size_t>(mask.layout_b) * static_cast<size_t>(mask.layout_h), where);
  const int64_t tiles = (sizes.T + kKeys - 1) / kKeys;
  for (int64_t b = 0; b < sizes.B; ++b) {
    for (int64_t g = 0; g < sizes.H / group; ++g) {
      const auto table = static_cast<size_t>(mask.TableOf(b, g));
      std::vector<int32_t> entry(static_cast<size_t>(tiles), -1);
      for (int32_t at = mask.row_ptr[table]; at < mask.row_ptr[table + 1]; ++at) {
        const bool first = at == mask.row_ptr[table] || at == mask.full_begin[table];
        const auto i = static_cast<size_t>(at);
        CHECK(first || mask.key_tile[i - 1] < mask.key_tile[i], where, ": not ascending");
        CHECK((mask.bits_id[i] < 0) == (at >= mask.full_begin[table]), where);
        CHECK(entry[static_cast<size_t>(mask.key_tile[i])] < 0, where, ": a tile twice");
        entry[static_cast<size_t>(mask.key_tile[i])] = at;
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int32_t at = entry[static_cast<size_t>(tile)];
        const int32_t id = at < 0 ? -1 : mask.bits_id[static_cast<size_t>(at)];
        bool any = false, all = true;
        for (int64_t row = 0; row < kRows; ++row) {
          const int64_t h = g * group + row / sizes.S, q = row % sizes.S;
          for (int64_t j = 0; j < kKeys; ++j) {
            const int64_t k = tile * kKeys + j;
            const bool there = row < group * sizes.S;
            const bool want =
                there && k < sizes.T && Allowed(random.expr, sizes, random.bindings, b, h, sizes.P + q, k);
            any = any || want, all = all && (want || !there);
            if (id < 0) continue;
            const auto word = static_cast<size_t>((id * int64_t{kRows} + row) * (kKeys / 32) + j / 32);
            CHECK(((mask.bits[word] >> (j % 32) & 1u) != 0) == want, where, ": b ", b, " h ", h, " q ", q, " k ", k);
          }
        }
        CHECK((at >= 0) == any, where, ": tile ", tile, " of group ", g);
        CHECK(at < 0 || (id < 0) == all, where, ": tile ", tile, " of group ", g, " is ", id < 0 ? "" : "not ", "full");
      }
    }
  }
}

}  // namespace

TEST(StackedMasksEqualTheDefinition) {
  Random random(31);
  int stacked = 0;
  for (int i = 0; i < Cases(400); ++i) {
    const int64_t group = random.Range(1, 8);
    ExprSizes sizes;
    sizes.B = random.Range(1, 2), sizes.H = group * random.Range(1, 3), sizes.S = random.Range(1, 16 / group);
    sizes.T = random.Range(1, 200), sizes.P = random.Range(0, 150);
    const RandomMask mask = MakeRandomMask(&random, sizes, false);
    BlockMask block;
    const Status status = BuildBlockMask(mask.expr, sizes, kRows, kKeys, &block);
    CHECK(status.ok(), mask.text, ": ", status.message());
    const BlockMask found = cuda::StackHeads(block, group);
    const std::string where = Text(mask.text, ", group of ", group);
    if (block.layout_h == 1) {
      CHECK(found.layout_h == 1 && found.S == sizes.S && found.bits == block.bits, where);
      continue;
    }
    CheckStacked(found, group, mask, where);
    CHECK(Longest(found) >= Longest(block) && Longest(found) <= group * Longest(block), where);
    ++stacked;
    CountCases(1);
  }
  CHECK(stacked > Cases(20), stacked);
}

TEST(StackedMasksKeepOneOfEqualTiles) {
  // 8 local blocks of 64 and every eighth, shifted by head: 32 heads in groups of 4 have two kinds of groups.
  MaskExpr expr;
  const Status parsed = MaskExpr::Parse("k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", {}, &expr);
  CHECK(parsed.ok(), parsed.message());
  for (const int64_t keys : {1024, 8192}) {
    const ExprSizes sizes = {1, 32, 1, keys, keys - 1};
    BlockMask block;
    CHECK(BuildBlockMask(expr, sizes, kRows, kKeys, &block).ok());
    const BlockMask found = cuda::StackHeads(block, 4);
    const std::set<int32_t> tables(found.layout.begin(), found.layout.end());
    CHECK(found.layout.size() == 8 && tables.size() == 2, tables.size());
    CHECK(found.bits.size() <= 16 * 64 * 2, found.bits.size());
    CHECK(Longest(found) == (keys == 1024 ? 12 : 68), Longest(found));
    CountCases(1);
  }
}

TEST(StackingPaysWhereTilesAreSavedOrTheDeviceIsFull) {
  CHECK(cuda::StackingPays(12, 9, 4, 8, 132));       // a third of the tiles
  CHECK(cuda::StackingPays(1028, 263, 4, 9, 132));   // as many, and clusters of nine groups read at full rate
  CHECK(!cuda::StackingPays(1028, 263, 4, 1, 132));  // as many, for eight CTAs instead of 32
  CHECK(cuda::StackingPays(64, 64, 4, 1, 132));      // nearly the same keys for all
}

}  // namespace stof::test
