// SPDX-License-Identifier: Apache-2.0
// Choose pages on the CPU: key bounds, page scores, the choice, and the mask that it leaves, each against a
// plain definition in double precision. Pages whose scores differ by rounding may be chosen in either order.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/cached_attention/pages.h"
#include "cpu/isa.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/host/thread_pool.h"
#include "plugins/core/mask/cached_mask.h"
#include "plugins/core/ops/cached_attention/chosen_pages.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/tests_by_isa.h"

namespace stof::test::choose_pages {
namespace {

// Masks as text and in C++.
struct MaskText {
  const char* text;
  bool (*allows)(int64_t h, int64_t q, int64_t k);
};
const MaskText kMasks[] = {
    {"k <= q", [](int64_t, int64_t, int64_t) { return true; }},
    {"q - k < 200", [](int64_t, int64_t q, int64_t k) { return q - k < 200; }},
    {"q - k < 20 or k // 16 % 3 == 0", [](int64_t, int64_t q, int64_t k) { return q - k < 20 || k / 16 % 3 == 0; }},
    {"q - k < 20 or k % 50 == 7", [](int64_t, int64_t q, int64_t k) { return q - k < 20 || k % 50 == 7; }},
    {"k // 32 % 3 != h // 2", [](int64_t h, int64_t, int64_t k) { return k / 32 % 3 != h / 2; }},
    {"q - k < 9 or k // 64 % 3 == h", [](int64_t h, int64_t q, int64_t k) { return q - k < 9 || k / 64 % 3 == h; }},
};

// A step of B sequences with all that it reads.
struct Problem {
  int64_t B = 1, H = 1, G = 1, S = 1, D = 8, rows = 16, chosen = 1, capacity = 0;
  DType dtype = DType::kF32;
  const MaskText* mask = nullptr;
  float scale = 1;
  std::vector<int32_t> first_rows, ends;
  std::vector<double> query, keys;  // [B, H, S, D], [B, G, capacity, D], rounded to dtype
  std::vector<char> query_bytes, key_bytes, bounds;

  explicit Problem(uint64_t seed) {
    Random random(seed);
    B = random.Range(1, 3), G = random.Range(1, 3), H = G * random.Pick(std::vector<int64_t>{1, 2, 4, 7});
    S = random.Pick(std::vector<int64_t>{1, 1, 3, 16}), D = random.Pick(std::vector<int64_t>{8, 33, 64, 128, 256});
    rows = random.Pick(std::vector<int64_t>{16, 32, 64, 128}), chosen = random.Range(1, 6);
    dtype = random.Pick(std::vector<DType>{DType::kF32, DType::kF16, DType::kBF16});
    mask = &kMasks[random.Range(0, static_cast<int64_t>(std::size(kMasks)) - 1)];
    scale = random.Pick(std::vector<float>{0.125f, 1.0f, -0.5f});
    for (int64_t b = 0; b < B; ++b) {
      ends.push_back(static_cast<int32_t>(random.Range(S, rows * random.Pick(std::vector<int64_t>{2, 14, 20}))));
      first_rows.push_back(static_cast<int32_t>(ends.back() - S));
      capacity = std::max<int64_t>(capacity, ends.back());
    }
    capacity += random.Range(0, 40);
    const auto fill = [&](int64_t count, std::vector<double>* values, std::vector<char>* bytes) {
      bytes->resize(static_cast<size_t>(count * SizeOf(dtype)));
      for (int64_t i = 0; i < count; ++i) {
        values->push_back(Rounded(dtype, static_cast<double>(random.Unit())));
        StoreFloat(dtype, values->back(), bytes->data() + i * SizeOf(dtype));
      }
    };
    fill(B * H * S * D, &query, &query_bytes);
    fill(B * G * capacity * D, &keys, &key_bytes);
    bounds.resize(static_cast<size_t>(B * G * Pages() * 2 * D * SizeOf(dtype)), char(0xff));
  }

  int64_t Pages() const { return CeilDiv(capacity, rows); }
  int64_t PagesOf(int64_t b) const { return CeilDiv(ends[static_cast<size_t>(b)], rows); }
  double Key(int64_t head, int64_t row, int64_t d) const {
    return keys[static_cast<size_t>((head * capacity + row) * D + d)];
  }
  double KeyBound(int64_t head, int64_t page, bool is_most, int64_t d) const {
    return LoadFloat(dtype,
                     bounds.data() + (((head * Pages() + page) * 2 + (is_most ? 1 : 0)) * D + d) * SizeOf(dtype));
  }
  int64_t RowsOf(int64_t b, int64_t page) const {
    return std::min<int64_t>(rows, ends[static_cast<size_t>(b)] - page * rows);
  }
  bool Allows(int64_t b, int64_t h, int64_t i, int64_t k) const {
    const int64_t q = first_rows[static_cast<size_t>(b)] + i;
    return k <= q && mask->allows(h, q, k);
  }
  // Whether the mask allows a KV head a key of a page.
  bool AllowsPage(int64_t head, int64_t page) const {
    const int64_t b = head / G, group = H / G;
    for (int64_t h = head % G * group; h < (head % G + 1) * group; ++h) {
      for (int64_t i = 0; i < S; ++i) {
        for (int64_t k = page * rows; k < page * rows + RowsOf(b, page); ++k) {
          if (Allows(b, h, i, k)) return true;
        }
      }
    }
    return false;
  }
  // The score of a page, and how far rounding may move it.
  double Score(int64_t head, int64_t page, double* tolerance) const {
    const int64_t b = head / G, group = H / G;
    double best = -std::numeric_limits<double>::infinity();
    *tolerance = 0;
    for (int64_t h = head % G * group; h < (head % G + 1) * group; ++h) {
      for (int64_t i = 0; i < S; ++i) {
        double sum = 0, magnitude = 0;
        for (int64_t d = 0; d < D; ++d) {
          const double x = static_cast<double>(scale) * query[static_cast<size_t>(((b * H + h) * S + i) * D + d)];
          const double term = std::max(x * KeyBound(head, page, false, d), x * KeyBound(head, page, true, d));
          sum += term, magnitude += std::fabs(term);
        }
        best = std::max(best, sum);
        *tolerance = std::max(*tolerance, magnitude * 0x1p-23 * 8);
      }
    }
    return best;
  }
  std::string Where(CpuIsa isa, uint64_t seed) const {
    return Text(CpuIsaName(isa), " seed ", seed, " B=", B, " H=", H, " G=", G, " S=", S, " D=", D, " rows=", rows,
                " chosen=", chosen, " ", TypeText(dtype), " mask ", mask->text);
  }
};

void CheckBounds(const cpu::PagesKernels& kernels, Problem* p, const std::string& where) {
  const int64_t item = SizeOf(p->dtype);
  for (int64_t head = 0; head < p->B * p->G; ++head) {
    for (int64_t page = 0; page < p->PagesOf(head / p->G); ++page) {
      const int64_t count = p->RowsOf(head / p->G, page);
      kernels.find_bounds(p->key_bytes.data() + (head * p->capacity + page * p->rows) * p->D * item, p->dtype, count,
                          p->D, p->bounds.data() + (head * p->Pages() + page) * 2 * p->D * item);
      for (int64_t d = 0; d < p->D; ++d) {
        double least = p->Key(head, page * p->rows, d), most = least;
        for (int64_t r = 0; r < count; ++r) {
          least = std::min(least, p->Key(head, page * p->rows + r, d));
          most = std::max(most, p->Key(head, page * p->rows + r, d));
        }
        CHECK(p->KeyBound(head, page, false, d) == least && p->KeyBound(head, page, true, d) == most, where, " page ",
              page);
      }
    }
  }
}

// What all cases of a test saw.
struct Totals {
  int64_t left_out = 0, near_ties = 0, heads = 0;
};

// The pages that a KV head attends, by the mask that the choice leaves: asked for tiles of one page, or of 32 keys.
std::vector<bool> AttendedPages(const Problem& p, const ChosenPages& chosen, int64_t head) {
  const DynamicMask& view = *chosen.view();
  const int64_t b = head / p.G, group = p.H / p.G, n = std::max<int64_t>(32, p.rows), words = n / 32;
  std::vector<bool> attended(static_cast<size_t>(p.PagesOf(b)));
  std::vector<uint32_t> bits(static_cast<size_t>(p.S * words));
  for (int64_t h = head % p.G * group; h < (head % p.G + 1) * group; ++h) {
    for (int64_t tile = 0; tile * n < p.ends[static_cast<size_t>(b)]; ++tile) {
      const int kind = view.tile(view.self, b, h, 0, tile * n, static_cast<int>(p.S), static_cast<int>(n), bits.data());
      for (int64_t i = 0; i < p.S && kind != 0; ++i) {
        for (int64_t k = 0; k < std::min<int64_t>(n, p.ends[static_cast<size_t>(b)] - tile * n); ++k) {
          if (kind == 2 || (bits[static_cast<size_t>(i * words + k / 32)] >> k % 32 & 1u) != 0) {
            attended[static_cast<size_t>((tile * n + k) / p.rows)] = true;
          }
        }
      }
    }
  }
  return attended;
}

// The mask that is left is the given one without whole pages, by tile and by runs of any tile size.
void CheckMask(const Problem& p, const DynamicMask& mask, const ChosenPages& chosen, int64_t head,
               const std::vector<bool>& attended, const std::string& where) {
  const DynamicMask& view = *chosen.view();
  const int64_t b = head / p.G, end = p.ends[static_cast<size_t>(b)], h = head % p.G * (p.H / p.G);
  const auto m = static_cast<int>(p.S);
  for (const int n : {32, 64, 128}) {
    const int64_t tiles = CeilDiv(end, n), words = n / 32;
    std::vector<uint32_t> own(static_cast<size_t>(m * words)), all(own.size());
    std::vector<KeyTileRun> runs(static_cast<size_t>(tiles));
    const int64_t first = tiles > 4 ? 1 : 0;
    const int64_t count = view.runs(view.self, b, h, 0, m, n, first, tiles, runs.data());
    CHECK(count <= tiles - first, where);
    for (int64_t tile = first; tile < tiles; ++tile) {
      const int kind = view.tile(view.self, b, h, 0, tile * n, m, n, own.data());
      const int base = mask.tile(mask.self, b, h, 0, tile * n, m, n, all.data());
      const KeyTileRun* const run = std::find_if(
          runs.data(), runs.data() + count, [tile](const KeyTileRun& r) { return r.first <= tile && tile < r.last; });
      const bool is_listed = run != runs.data() + count;
      CHECK(kind == 0 || is_listed, where, ": tile ", tile, " of ", n, " keys is in no run");
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t k = 0; k < std::min<int64_t>(n, end - tile * n); ++k) {
          const auto word = static_cast<size_t>(i * words + k / 32);
          const bool is_allowed = base == 2 || (base == 1 && (all[word] >> k % 32 & 1u) != 0);
          const bool expected = is_allowed && attended[static_cast<size_t>((tile * n + k) / p.rows)];
          const bool found = kind == 2 || (kind == 1 && (own[word] >> k % 32 & 1u) != 0);
          CHECK(found == expected, where, ": key ", tile * n + k, " of query ", i, " with tiles of ", n);
          if (is_listed && run->is_full) CHECK(expected, where, ": tile ", tile, " of ", n, " keys is not full");
        }
      }
    }
  }
}

void CheckChoice(const Problem& p, const ChosenPages& chosen, const DynamicMask& mask, int64_t head,
                 const std::vector<float>& scores, Totals* totals, const std::string& where) {
  const int64_t b = head / p.G, pages = p.PagesOf(b);
  const std::vector<bool> attended = AttendedPages(p, chosen, head);
  const int64_t recent = FirstRecentPage(p.rows, p.first_rows[static_cast<size_t>(b)]);
  std::vector<std::pair<double, int64_t>> others;  // minus the score, and the page
  double tolerance = 0;
  for (int64_t page = 0; page < pages; ++page) {
    if (!p.AllowsPage(head, page)) {
      CHECK(!attended[static_cast<size_t>(page)], where, ": page ", page, " has no allowed key");
    } else if (page == 0 || page >= recent) {
      CHECK(attended[static_cast<size_t>(page)], where, ": page ", page, " is always attended");
    } else {
      double own = 0;
      others.emplace_back(-p.Score(head, page, &own), page);
      tolerance = std::max(tolerance, own);
    }
  }
  ++totals->heads;
  std::sort(others.begin(), others.end());
  const auto k = static_cast<size_t>(p.chosen);
  if (others.size() > k) {
    const double last = others[k - 1].first, next = others[k].first;
    totals->near_ties += next - last <= 2 * tolerance ? 1 : 0;
    size_t taken = 0;
    for (const auto& [minus, page] : others) {
      const bool is_taken = attended[static_cast<size_t>(page)];
      CHECK(is_taken ? minus <= last + 2 * tolerance : minus >= next - 2 * tolerance, where, ": page ", page,
            is_taken ? " is attended" : " is left out", ", its score is ", -minus, ", the last one taken ", -last);
      CHECK(std::fabs(static_cast<double>(scores[static_cast<size_t>(head * chosen.pages() + page)]) + minus) <=
                tolerance,
            where, ": score of page ", page);
      taken += is_taken ? 1 : 0;
      totals->left_out += is_taken ? 0 : 1;
    }
    CHECK(taken == k, where, ": ", taken, " pages, expected ", k);
  } else {
    for (const auto& other : others) CHECK(attended[static_cast<size_t>(other.second)], where, ": all are attended");
  }
  CheckMask(p, mask, chosen, head, attended, where);
}

void RunCase(CpuIsa isa, uint64_t seed, const Parallel& team, Totals* totals) {
  Problem p(seed);
  const std::string where = p.Where(isa, seed);
  const cpu::PagesKernels& kernels = *cpu::KernelsOf(isa).pages;
  CheckBounds(kernels, &p, where);
  CachedMask mask;
  Status status = MakeCachedMask(p.mask->text, {}, 0, &mask);
  CHECK(status.ok(), status.message());
  CHECK(CompareHeads(p.H, p.G, &mask).ok());
  std::unique_ptr<BoundCachedMask> bound;
  const int64_t keys = *std::max_element(p.ends.begin(), p.ends.end());
  status = BoundCachedMask::Make(mask.expr, {p.B, p.H, p.S, keys, 0}, p.first_rows.data(), p.ends.data(), &bound,
                                 mask.alike_heads);
  CHECK(status.ok(), status.message());
  const ChoosingStep step = {p.B, p.H, p.G, p.S, p.first_rows.data(), p.ends.data(), p.chosen, p.rows};
  const int64_t count = p.B * p.G * step.CountPages();
  std::vector<uint8_t> states(static_cast<size_t>(count));
  ChosenPages chosen(*bound->view(), step, states.data());
  AttentionArgs args;
  args.shape = {p.B, p.H, p.G, p.S, keys, p.D, p.D, p.dtype};
  args.query = {p.query_bytes.data(), {p.H * p.S * p.D, p.S * p.D, p.D}};
  args.scores.scale = p.scale;
  args.kv.choice = {p.chosen, p.rows, p.bounds.data(), p.G * p.Pages() * 2 * p.D, p.Pages() * 2 * p.D, 2 * p.D};
  std::vector<float> scores(static_cast<size_t>(count), std::numeric_limits<float>::infinity()), memory(scores.size());
  for (int64_t head = 0; head < p.B * p.G; ++head) {
    const PageSpan& span = chosen.spans()[head];
    if (span.first < span.last) {
      kernels.score(args, head / p.G, head % p.G, span.first, span.last, scores.data() + head * chosen.pages());
    }
  }
  chosen.Choose(scores.data(), memory.data(), team);
  uint64_t allowed = 0, left_out = 0, expected[2] = {};
  chosen.CountPairs(&allowed, &left_out);
  for (int64_t head = 0; head < p.B * p.G; ++head) {
    CheckChoice(p, chosen, *bound->view(), head, scores, totals, where);
    const std::vector<bool> attended = AttendedPages(p, chosen, head);
    for (int64_t page = 0; page < p.PagesOf(head / p.G); ++page) {
      const auto pairs = static_cast<uint64_t>(p.S * (p.H / p.G) * p.RowsOf(head / p.G, page));
      if (!p.AllowsPage(head, page)) continue;
      expected[0] += pairs;
      if (!attended[static_cast<size_t>(page)]) expected[1] += pairs;
    }
  }
  CHECK(allowed == expected[0] && left_out == expected[1], where, ": counts ", allowed, " and ", left_out);
  CountCases(1);
}

void RunTable(CpuIsa isa) {
  ThreadPool pool(3);
  Totals totals;
  const int cases = Cases(300);
  for (int seed = 0; seed < cases; ++seed) RunCase(isa, static_cast<uint64_t>(seed), pool.view(), &totals);
  if (cases < 100) return;
  CHECK(totals.left_out > totals.heads, "only ", totals.left_out, " pages are left out");
  CHECK(totals.near_ties * 50 < totals.heads, totals.near_ties, " of ", totals.heads, " choices are near ties");
}

TEST(ChosenPagesOfEqualScoresAreTheFirst) {
  CachedMask mask;
  CHECK(MakeCachedMask("k <= q", {}, 0, &mask).ok());
  const int32_t first = 319, end = 320;
  std::unique_ptr<BoundCachedMask> bound;
  CHECK(BoundCachedMask::Make(mask.expr, {1, 1, 1, 320, 0}, &first, &end, &bound).ok());
  const ChoosingStep step = {1, 1, 1, 1, &first, &end, 3, 16};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto choose = [&](const std::vector<float>& scores) {
    std::vector<uint8_t> states(20);
    ChosenPages chosen(*bound->view(), step, states.data());
    std::vector<float> memory(20);
    chosen.Choose(scores.data(), memory.data(), Parallel{});
    std::string text;
    for (int64_t page = 1; page < 18; ++page) {
      uint32_t bits = 0;
      const int kind = chosen.view()->tile(chosen.view()->self, 0, 0, 0, page / 2 * 32, 1, 32, &bits);
      if (kind == 2 || (kind == 1 && (bits >> page % 2 * 16 & 1u) != 0)) text += std::to_string(page) + " ";
    }
    CountCases(1);
    return text;
  };
  std::vector<float> scores(20, 2.0f);
  CHECK(choose(scores) == "1 2 3 ", choose(scores));
  scores[7] = 3, scores[17] = 3;
  CHECK(choose(scores) == "1 7 17 ", choose(scores));
  scores[9] = nan;
  CHECK(choose(scores) == "7 9 17 ", choose(scores));
  scores[3] = scores[4] = scores[5] = std::numeric_limits<float>::infinity();  // behind a NaN
  CHECK(choose(scores) == "3 4 9 ", choose(scores));
  scores[8] = scores[10] = scores[11] = nan;
  CHECK(choose(scores) == "8 9 10 ", choose(scores));
  scores[0] = scores[18] = scores[19] = 100;  // always attended, on top of the three
  CHECK(choose(scores) == "8 9 10 ", choose(scores));
}

// Registers the tests of each instruction set of this machine.
const bool registered = [] {
#define STOF_TESTS(id, name, is_supported) {{"ChosenPagesEqualTheDefinition[" #name "]", [] { RunTable(CpuIsa::id); }}},
  static constexpr Test kRows[][1] = {STOF_CPU_ISAS(STOF_TESTS)};
#undef STOF_TESTS
  return RegisterByIsa(&cpu::KernelTable::pages, kRows);
}();

}  // namespace
}  // namespace stof::test::choose_pages
