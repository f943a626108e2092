// SPDX-License-Identifier: Apache-2.0
// Key columns of masks: which masks have them, for which heads they are alike, and the gathered mask pair by pair.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/mask/attention_mask.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/mask/columns/key_columns.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

MaskExpr Parse(const std::string& text, const Tables& tables = {}) {
  MaskExpr expr;
  const Status status = MaskExpr::Parse(text, tables, &expr);
  CHECK(status.ok(), text, ": ", status.message());
  return expr;
}

TEST(MasksAreSplitAtTheirColumns) {
  struct SplitCase {
    const char *text, *base, *rest, *columns;
  };
  const SplitCase cases[] = {
      {"k <= q and (q - k < 96 or k % 37 == 0)", "k <= q", "q - k < 96", "k % 37 == 0"},
      {"(k % 5 == 1 or k < 4) or q == k", "", "q == k", "k % 5 == 1 or k < 4"},
      {"k <= q and (k <= q and q - k < 9 or k <= q and k % 37 == 0)", "k <= q", "q - k < 9", "k % 37 == 0"},
      {"k <= q and q - k < 9 or k <= q and k % 37 == 0", "k <= q", "q - k < 9", "k % 37 == 0"},
      {"k <= q and k % 37 == 0", "k <= q", "", "k % 37 == 0"},
      {"q - k < 9 or k % 7 == 0 and k < 90", "", "q - k < 9", "k % 7 == 0 and k < 90"},
      {"q - k < 9 or k % 7 == h // 2", "", "q - k < 9", "k % 7 == h // 2"},
  };
  for (const SplitCase& one : cases) {
    ColumnSplit split;
    CHECK(SplitColumns(Parse(one.text), &split), one.text);
    CHECK(split.base.Print() == one.base, one.text, ": ", split.base.Print());
    CHECK(split.rest.Print() == one.rest, one.text, ": ", split.rest.Print());
    CHECK(split.columns.Print() == one.columns, one.text, ": ", split.columns.Print());
  }
  for (const char* text : {"k <= q", "q - k < 9 or k < S and q > 3", "q - k < 9 or k < P", "q - k < 9 or b == 0",
                           "k <= q and (q - k < 9 or (q + k) % 4 == 0)", "True", "h == 0"}) {
    ColumnSplit split;
    CHECK(!SplitColumns(Parse(text), &split), text, " has columns ", split.columns.Print());
  }
  CountCases(std::size(cases));
}

TEST(HeadsOfGroupsAreCompared) {
  const std::vector<uint8_t> rows = {1, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 0, 1};   // [8, 2], pairs of rows differ
  const std::vector<uint8_t> alike = {1, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 0, 1};  // [8, 2], equal in fours
  const auto table = [](const std::vector<uint8_t>& data) {
    Tensor tensor = TensorOfShape(DType::kBool, {8, 2});
    tensor.data = const_cast<uint8_t*>(data.data());
    return Tables{{"table0", tensor}};
  };
  struct HeadCase {
    const char* text;
    Tables tables;
    bool are_alike;
  };
  const HeadCase cases[] = {
      {"k <= q", {}, true},
      {"k % 8 == h // 4", {}, true},
      {"k % 8 == h // 8", {}, true},
      {"k % 8 == h // 2", {}, false},
      {"k % 8 == h", {}, false},
      {"(k // 64 + h // 4 * 3) % 16 == 0", {}, true},
      {"h < 4 or k % 2 == 0", {}, true},
      {"h < 3 or k % 2 == 0", {}, false},
      {"h - h % 4 == k", {}, true},
      {"table0[h, k % 2]", table(alike), true},
      {"table0[h, k % 2]", table(rows), false},
      {"table0[h // 4, k % 2]", table(rows), true},
      {"table0[k % 8, h % 2]", table(rows), false},
  };
  for (const HeadCase& one : cases) {
    CHECK(AreHeadsAlike(Parse(one.text, one.tables), 8, 4) == one.are_alike, one.text);
    CHECK(AreHeadsAlike(Parse(one.text, one.tables), 8, 1), one.text);
  }
  CountCases(std::size(cases));
}

// Random masks of random sizes: the columns and the gathered mask say what the mask does.
TEST(GatheredMasksEqualTheMask) {
  const int count = Cases(400);
  Random random(31);
  const std::vector<std::string> kBases = {"", "k <= q", "k <= q and q - k < 90", "q % 3 != 1", "k < T - 2"};
  const std::vector<std::string> kRests = {"q - k < 5", "abs(q - k) < 7", "q - k == 30", "q // 8 == k // 8", ""};
  const std::vector<std::string> kColumns = {
      "k % 37 == 0", "(k + h // 2) % 23 == 1",          "table0[h // 2, k]", "k % 17 == 2 and k < 50",
      "k < 3",       "table0[h // 2, k] and k % 2 == 0"};
  int gathered = 0;
  for (int i = 0; i < count; ++i) {
    ExprSizes sizes = {1, 4, random.Range(1, 150), random.Range(100, 400), 0};
    sizes.P = random.OneIn(2) ? 0 : sizes.T - std::min(sizes.S, sizes.T);
    std::vector<uint8_t> data(static_cast<size_t>(2 * sizes.T));
    for (uint8_t& x : data) x = random.OneIn(30);
    Tensor table = TensorOfShape(DType::kBool, {2, sizes.T});
    table.data = data.data();
    const std::string base = random.Pick(kBases), rest = random.Pick(kRests), columns = random.Pick(kColumns);
    const std::string any = rest.empty() ? columns : "(" + rest + " or " + columns + ")";
    const std::string text = base.empty() ? any : base + " and " + any;
    const MaskExpr expr = Parse(text, {{"table0", table}});
    const ColumnSource source(expr);
    CHECK(source.has_columns(), text);
    const auto found = source.Get(4, 2, sizes.T, sizes.T);
    CHECK(found->columns != nullptr, text);
    const KeyColumns& lists = *found->columns;
    for (int64_t h = 0; h < 4; h += 2) {
      const std::vector<int32_t>& keys = lists.keys(lists.ListOf(h / 2));
      for (int64_t k = 0; k < sizes.T; ++k) {
        const bool is_listed = std::binary_search(keys.begin(), keys.end(), static_cast<int32_t>(k));
        CHECK(is_listed == Allowed(source.split().columns, sizes, {}, 0, h, 0, k), text, " key ", k);
        CHECK(is_listed == ((lists.words(lists.ListOf(h / 2))[k / 64] >> (k % 64) & 1) != 0), text, " bit ", k);
      }
    }
    if (found->mask == nullptr) continue;
    ++gathered;
    const MaskExpr& mask = found->mask->parts.fixed;
    ExprSizes axis = sizes;
    axis.T += lists.packed();
    std::vector<ExprBinding> none(mask.operands().size());
    CHECK(mask.Check(axis, &none).ok(), text);
    for (int pair = 0; pair < 60; ++pair) {
      const int64_t h = random.Range(0, 3), q = sizes.P + random.Range(0, sizes.S - 1);
      const std::vector<int32_t>& keys = lists.keys(lists.ListOf(h / 2));
      // Each key is allowed once: as a column, or behind the columns.
      const int64_t k =
          random.OneIn(2) && !keys.empty() ? keys[random.Next() % keys.size()] : random.Range(0, sizes.T - 1);
      const auto place = std::lower_bound(keys.begin(), keys.end(), k);
      const bool is_column = place != keys.end() && *place == k;
      int times = Allowed(mask, axis, {}, 0, h, q, lists.packed() + k) ? 1 : 0;
      if (is_column) times += Allowed(mask, axis, {}, 0, h, q, place - keys.begin()) ? 1 : 0;
      CHECK(times == (Allowed(expr, sizes, {}, 0, h, q, k) ? 1 : 0), text, " gathered ", mask.Print(), " at ", h, ", ",
            q, ", ", k, ": ", times, " times");
      const int64_t padding = random.Range(static_cast<int64_t>(keys.size()), lists.packed() - 1);
      CHECK(!Allowed(mask, axis, {}, 0, h, q, padding), text, " allows padding ", padding);
    }
  }
  CHECK(gathered > count / 4, gathered);
  CountCases(gathered);
}

// The mask of a step for kernels that pack groups: h is the KV head, and rows have one position.
TEST(MasksOfGroupsEqualTheMask) {
  for (const char* text : {"k <= q and (q - k < 5 or (q // 4 - k // 4 + h // 4) % 3 == 0)", "k < q - h // 4 * S",
                           "k <= P and k % 3 == h // 4"}) {
    CachedMask mask;
    CHECK(MakeCachedMask(text, {}, 0, &mask).ok() && CompareHeads(8, 2, &mask).ok());
    CHECK(mask.alike_heads == 4 && mask.of_groups != nullptr, text);
    const MaskParts& parts = mask.of_groups->parts;
    for (int32_t past = 0; past < 40; ++past) {
      std::vector<int64_t> first = {past};
      Tensor positions = TensorOfShape(DType::kI64, {1});
      positions.data = first.data();
      const ExprSizes own = {1, 8, 1, past + 1, past}, packed = {1, 2, 4, past + 1, 0};
      for (int64_t h = 0; h < 8; ++h) {
        for (int64_t k = 0; k <= past; ++k) {
          bool found = true;
          for (const MaskExpr* part : {&parts.fixed, &parts.dynamic}) {
            if (part->empty()) continue;
            found = found && Allowed(*part, packed, Bind(*part, {{kFirstPositions, positions}}), 0, h / 4, h % 4, k);
          }
          CHECK(found == Allowed(mask.expr, own, {}, 0, h, past, k), text, " at ", h, ", ", past, ", ", k);
        }
      }
    }
  }
  for (const char* text : {"k <= q", "k <= q and k % 3 == h"}) {
    CachedMask mask;
    CHECK(MakeCachedMask(text, {}, 0, &mask).ok() && CompareHeads(8, 2, &mask).ok() && mask.of_groups == nullptr, text);
  }
}

// Runs by key columns have the tiles that the expression has, and are full only where all keys are allowed.
TEST(KeyColumnsListTheTilesOfACache) {
  const int count = Cases(200);
  Random random(37);
  const std::vector<std::string> kTexts = {"q - k < 7 or k % 37 == 0", "q - k < 70 or (k // 64 + h // 2) % 4 == 0",
                                           "q // 16 - k // 16 < 3 or k // 16 % 8 == 1", "k % 200 < 130",
                                           "k % 3 != 1 and (q - k < 100 or k < 65)"};
  for (int i = 0; i < count; ++i) {
    CachedMask mask;
    CHECK(MakeCachedMask(random.Pick(kTexts), {}, 0, &mask).ok() && mask.columns != nullptr);
    ExprSizes sizes = {2, 4, random.Range(1, 40), 0, 0};
    std::vector<int32_t> first, ends;
    for (int64_t b = 0; b < sizes.B; ++b) {
      first.push_back(static_cast<int32_t>(random.Range(0, 900)));
      ends.push_back(first.back() + static_cast<int32_t>(sizes.S));
      sizes.T = std::max<int64_t>(sizes.T, ends.back());
    }
    const auto columns = mask.columns->Get(4, 2, sizes.T + random.Range(0, 500), -1);
    std::unique_ptr<BoundCachedMask> bound;
    CHECK(BoundCachedMask::Make(mask.expr, sizes, first.data(), ends.data(), &bound, 2, &mask.columns->split(),
                                columns->columns.get())
              .ok());
    const int n = random.OneIn(2) ? 64 : 128;
    const int64_t b = random.Range(0, 1), h = random.Range(0, 3), row0 = random.Range(0, (sizes.S - 1) / 8) * 8;
    const int m = 8;
    std::vector<KeyTileRun> runs(static_cast<size_t>(sizes.T / n + 1));
    const DynamicMask* view = bound->view();
    const int64_t found = view->runs(view->self, b, h, row0, m, n, 0, static_cast<int64_t>(runs.size()), runs.data());
    ExprSizes own = sizes;
    own.P = first[static_cast<size_t>(b)], own.T = ends[static_cast<size_t>(b)];
    for (int64_t tile = 0; tile * n < own.T; ++tile) {
      const auto run = std::find_if(runs.begin(), runs.begin() + found,
                                    [&](const KeyTileRun& r) { return r.first <= tile && tile < r.last; });
      bool any = false, all = true;
      for (int64_t q = row0; q < std::min<int64_t>(row0 + m, sizes.S); ++q) {
        for (int64_t k = tile * n; k < std::min<int64_t>(tile * n + n, own.T); ++k) {
          const bool is_allowed = Allowed(mask.expr, own, {}, b, h, own.P + q, k);
          any = any || is_allowed;
          all = all && is_allowed;
        }
      }
      const bool is_listed = run != runs.begin() + found;
      CHECK(is_listed || !any, mask.expr.Print(), " tile ", tile, " is missing");
      CHECK(!is_listed || !run->is_full || all, mask.expr.Print(), " tile ", tile, " is not full");
    }
  }
  CountCases(count);
}

}  // namespace
}  // namespace stof::test
