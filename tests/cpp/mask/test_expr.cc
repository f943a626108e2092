// SPDX-License-Identifier: Apache-2.0
// Parser, printer, rows, intervals and signatures.
#include <algorithm>
#include <map>

#include "plugins/core/mask/expr_eval.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

std::string Canonical(const std::string& text) {
  MaskExpr expr;
  const Status status = MaskExpr::Parse(text, {}, &expr);
  return status.ok() ? expr.Print() : "error: " + status.message();
}

bool Rejects(const std::string& text) { return Canonical(text).compare(0, 7, "error: ") == 0; }

std::string Repeat(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(ParserPrintsCanonically) {
  const std::pair<const char*, const char*> cases[] = {
      {"abs(q-k)<=64 or k<16", "abs(q - k) <= 64 or k < 16"},
      {"((k <= q)) and (q - k < 4)", "k <= q and q - k < 4"},
      {"q - (k - 1) == 0", "q - (k - 1) == 0"},
      {"(q - k) - 1 == 0", "q - k - 1 == 0"},
      {"- 5 // 2 < k", "-5 // 2 < k"},
      {"-(q * 2) < k", "-(q * 2) < k"},
      {"-q * 2 < k", "-q * 2 < k"},
      {"--q < --3", "-(-q) < 3"},
      {"not(not k<q)", "not not k < q"},
      {"not (k < q and q < 3)", "not (k < q and q < 3)"},
      {"(k<1 or q<1) and pad[b,k]", "(k < 1 or q < 1) and pad[b, k]"},
      {"min( q,max(k , 3) )%7 != -2", "min(q, max(k, 3)) % 7 != -2"},
      {"q // 64 == k // 64", "q // 64 == k // 64"},
      {"q * (k // 2) < (q * k) // 2", "q * (k // 2) < q * k // 2"},
      {"lengths[b] > k", "lengths[b] > k"},
      {"True", "True"},
      {"  ", "True"},
  };
  for (const auto& [text, want] : cases) CHECK(Canonical(text) == want, text, " -> ", Canonical(text));
  CountCases(std::size(cases));
}

TEST(ParserRejects) {
  const std::string cases[] = {
      "q",
      "q < k < 3",
      "q and k",
      "not q",
      "q + (k < 3) < 2",
      "q // k < 1",
      "q // 0 < 1",
      "q % (2 - 2) < 1",
      "q // S < 1",
      "table0[k]",
      "x < 1",
      "pad[k]",
      "pad[b, k, 0]",
      "segment_q[b, q]",
      "abs(q, k) < 1",
      "min(q) < 1",
      "q <",
      "(q < k",
      "q < k)",
      "q < 9007199254740993",
      "q = k",
      "q && k",
      "q < k\n",
      std::string("q < k\0", 6),
      "q < 1.5",
      "Q < k",
      "and",
      "q < k and",
      "pad[b, k] == 1",
      Repeat("(", 200) + "q < k" + Repeat(")", 200),
      Repeat("not ", 200) + "q < k",
      Repeat("-", 200) + "q < k",
      Repeat("abs(", 100) + "q" + Repeat(")", 100) + " < k",
      "q < k" + Repeat(" and q < k", 2000),
      "q < " + Repeat(" ", 70000) + "k",
      Repeat("(", 60000),
  };
  for (const std::string& text : cases) CHECK(Rejects(text), text.substr(0, 80));
  CountCases(std::size(cases));
}

TEST(ParserTakesWhatTheLimitsAllow) {
  CHECK(!Rejects("q < k" + Repeat(" and q < k", 1000)));
  CHECK(!Rejects("q < k" + Repeat(" or q < k", 1000)));
  CHECK(!Rejects("q" + Repeat(" + 1", 2000) + " < k"));
  CHECK(!Rejects(Repeat("(", 60) + "q < k" + Repeat(")", 60)));
  CHECK(!Rejects(Repeat("abs(", 60) + "q" + Repeat(")", 60) + " < k"));
  CHECK(!Rejects("q < 9007199254740992"));
  CountCases(6);
}

// Whatever the text: an error, or an expression whose print parses to itself.
void FeedParser(const std::string& text, const Operands& operands, int64_t* accepted) {
  MaskExpr expr;
  if (!MaskExpr::Parse(text, operands.tables, &expr).ok()) return;
  ++*accepted;
  MaskExpr again;
  const std::string printed = expr.Print();
  const Status status = MaskExpr::Parse(printed, operands.tables, &again);
  CHECK(status.ok(), text, " prints as ", printed, ": ", status.message());
  CHECK(again.Print() == printed && again.Hash() == expr.Hash(), text, " prints as ", printed);
}

TEST(ParserFuzz) {
  static const std::vector<std::string> kTokens = {"q",         "k",
                                                   "b",         "h",
                                                   "S",         "T",
                                                   "P",         "(",
                                                   ")",         "[",
                                                   "]",         ",",
                                                   "+",         "-",
                                                   "*",         "//",
                                                   "%",         "<",
                                                   "<=",        ">",
                                                   "==",        "!=",
                                                   "and",       "or",
                                                   "not",       "abs",
                                                   "min",       "max",
                                                   "pad",       "segment_q",
                                                   "segment_k", "lengths",
                                                   "table0",    "table3",
                                                   "0",         "1",
                                                   "64",        "9007199254740992",
                                                   "True",      "False",
                                                   " ",         "\t",
                                                   "!",         "=",
                                                   "/",         "\xc3\xa9",
                                                   "_",         "table"};
  Random random(1);
  int64_t accepted = 0;
  const int count = Cases(60000);
  const RandomMask base = MakeRandomMask(&random, {1, 2, 16, 16, 0}, true);
  for (int i = 0; i < count; ++i) {
    std::string text;
    if (i % 2 == 0) {
      for (int64_t n = random.Range(1, 14); n > 0; --n) text += random.Pick(kTokens) + (random.OneIn(2) ? " " : "");
    } else {  // mutations of a legal expression
      text = MakeRandomMask(&random, {1, 2, 16, 16, 0}, true).text;
      for (int64_t n = random.Range(1, 3); n > 0 && !text.empty(); --n) {
        const auto at = static_cast<size_t>(random.Range(0, static_cast<int64_t>(text.size()) - 1));
        if (random.OneIn(3)) {
          text.erase(at, static_cast<size_t>(random.Range(1, 4)));
        } else if (random.OneIn(2)) {
          text.insert(at, random.Pick(kTokens));
        } else {
          text[at] = static_cast<char>(random.Range(0, 255));
        }
      }
    }
    FeedParser(text, base.operands, &accepted);
  }
  CHECK(accepted > count / 50, accepted);
  CountCases(count);
}

TEST(RowsEqualTheDefinition) {
  int64_t pairs = 0;
  for (int i = 0, count = Cases(3000); i < count; ++i) {
    Random random(static_cast<uint64_t>(i));
    const ExprSizes s = RandomSizes(&random, random.OneIn(4) ? 300 : 40);
    const RandomMask mask = MakeRandomMask(&random, s, true);
    ExprEvaluator evaluator(mask.expr, s, mask.bindings);
    std::vector<uint8_t> row(static_cast<size_t>(s.T));
    for (int r = 0; r < 20; ++r) {
      const int64_t b = random.Range(0, s.B - 1);
      const int64_t h = random.Range(0, s.H - 1);
      const int64_t q = s.P + random.Range(0, s.S - 1);
      const int64_t k0 = random.Range(0, s.T - 1);
      const int64_t n = random.Range(1, s.T - k0);
      evaluator.Row(b, h, q, k0, n, row.data());
      for (int64_t j = 0; j < n; ++j) {
        CHECK((row[static_cast<size_t>(j)] != 0) == Allowed(mask.expr, s, mask.bindings, b, h, q, k0 + j), "seed ", i,
              " ", mask.text, " b ", b, " h ", h, " q ", q, " k ", k0 + j);
      }
      pairs += n;
    }
  }
  CountCases(pairs);
}

// Splits an expression and joins the parts again: the conjunction is the expression.
TEST(PartsMakeTheWhole) {
  int64_t pairs = 0;
  for (int i = 0, count = Cases(3000); i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + 50000);
    const ExprSizes s = RandomSizes(&random, 12);
    const RandomMask mask = MakeRandomMask(&random, s, true);
    const MaskParts parts = SplitMask(mask.expr);
    CHECK(!parts.fixed.UsesRuntime());
    const auto fixed = Bind(parts.fixed, mask.operands.runtime);
    const auto dynamic = Bind(parts.dynamic, mask.operands.runtime);
    MaskExpr pad;
    CHECK(MaskExpr::Parse("pad[b, k]", {}, &pad).ok());
    const auto pad_binding = Bind(pad, mask.operands.runtime);
    for (int64_t q = s.P; q < s.P + s.S; ++q) {
      for (int64_t k = 0; k < s.T; ++k) {
        const int64_t b = (q + k) % s.B;
        const int64_t h = (q + 2 * k) % s.H;
        const bool joined = Allowed(parts.fixed, s, fixed, b, h, q, k) &&
                            Allowed(parts.dynamic, s, dynamic, b, h, q, k) &&
                            (!parts.pad || Allowed(pad, s, pad_binding, b, h, q, k));
        CHECK(joined == Allowed(mask.expr, s, mask.bindings, b, h, q, k), "seed ", i, " ", mask.text);
        ++pairs;
      }
    }
  }
  CountCases(pairs);
}

TEST(IntervalsAreSoundAndSignaturesToo) {
  int64_t boxes = 0;
  int64_t decided = 0;
  for (int i = 0, count = Cases(4000); i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + 100000);
    const ExprSizes s = RandomSizes(&random, 60);
    const RandomMask mask = MakeRandomMask(&random, s, true);
    ExprEvaluator evaluator(mask.expr, s, mask.bindings);
    std::map<std::vector<int64_t>, std::string> patterns;  // by signature and size of the box
    for (int r = 0; r < 25; ++r, ++boxes) {
      const int64_t rows = random.Range(1, std::min<int64_t>(s.S, 9));
      const int64_t keys = random.Range(1, std::min<int64_t>(s.T, 9));
      const int64_t q = s.P + random.Range(0, s.S - rows);
      const int64_t k = random.Range(0, s.T - keys);
      const int64_t b = random.Range(0, s.B - 1);
      const int64_t h = random.Range(0, s.H - 1);
      const Verdict verdict = evaluator.Classify({b, b, h, h, q, q + rows - 1, k, k + keys - 1});
      std::vector<int64_t> key;
      evaluator.Signature(&key);
      key.push_back(rows);
      key.push_back(keys);
      std::string pattern;
      for (int64_t y = 0; y < rows; ++y) {
        for (int64_t x = 0; x < keys; ++x) {
          pattern += Allowed(mask.expr, s, mask.bindings, b, h, q + y, k + x) ? '1' : '0';
        }
      }
      const auto found = patterns.emplace(key, pattern).first;
      CHECK(found->second == pattern, "seed ", i, " ", mask.text, ": one signature, two patterns");
      if (verdict == Verdict::kMixed) continue;
      ++decided;
      const char expected = verdict == Verdict::kAll ? '1' : '0';
      CHECK(std::all_of(pattern.begin(), pattern.end(), [=](char c) { return c == expected; }), "seed ", i, " ",
            mask.text, " q ", q, " k ", k, " ", pattern);
    }
  }
  CHECK(decided * 2 > boxes, "only ", decided, " of ", boxes, " boxes decided");
  CountCases(boxes);
}

// Boxes over several batches and heads, as the whole-problem checks use them.
TEST(IntervalsOfWideBoxes) {
  for (int i = 0, count = Cases(2000); i < count; ++i) {
    Random random(static_cast<uint64_t>(i) + 200000);
    const ExprSizes s = RandomSizes(&random, 14);
    const RandomMask mask = MakeRandomMask(&random, s, true);
    ExprEvaluator evaluator(mask.expr, s, mask.bindings);
    const Verdict verdict = evaluator.Classify({0, s.B - 1, 0, s.H - 1, s.P, s.P + s.S - 1, 0, s.T - 1});
    if (verdict == Verdict::kMixed) continue;
    for (int64_t at = 0; at < s.B * s.H * s.S * s.T; ++at) {
      const bool value = Allowed(mask.expr, s, mask.bindings, at % s.B, at / s.B % s.H, s.P + at / (s.B * s.H) % s.S,
                                 at / (s.B * s.H * s.S));
      CHECK(value == (verdict == Verdict::kAll), "seed ", i, " ", mask.text);
    }
  }
  CountCases(Cases(2000));
}

TEST(WindowsAndBlocksAreDecidedExactly) {
  // What the intervals of common masks must not leave open: a tile is mixed only if it really is.
  const char* const masks[] = {"abs(q - k) <= 5",      "k <= q", "q // 4 == k // 4",
                               "k <= q and q - k < 7", "k < 3",  "(q - k) + k - q == 0",
                               "2 * q - q >= k"};
  for (const char* text : masks) {
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok());
    const ExprSizes s = {1, 1, 48, 48, 0};
    ExprEvaluator evaluator(expr, s, {});
    for (int64_t q = 0; q < s.S; q += 4) {
      for (int64_t k = 0; k < s.T; k += 4) {
        int ones = 0;
        for (int64_t i = 0; i < 16; ++i) ones += Allowed(expr, s, {}, 0, 0, q + i / 4, k + i % 4) ? 1 : 0;
        const Verdict want = ones == 0 ? Verdict::kNone : ones == 16 ? Verdict::kAll : Verdict::kMixed;
        CHECK(evaluator.Classify({0, 0, 0, 0, q, q + 3, k, k + 3}) == want, text, " q ", q, " k ", k);
        CountCases(1);
      }
    }
  }
}

TEST(OverflowAndIndicesAreRefused) {
  const ExprSizes s = {2, 2, 100, 100, 0};
  int64_t table[8] = {};
  Tensor tensor;
  tensor.data = table;
  tensor.dtype = DType::kI64;
  tensor.rank = 1;
  tensor.dims[0] = 8;
  const auto check = [&](const char* text, const ExprSizes& sizes) {
    MaskExpr expr;
    const Status status = MaskExpr::Parse(text, {{"table0", tensor}}, &expr);
    CHECK(status.ok(), status.message());
    std::vector<ExprBinding> bindings(expr.operands().size());
    return expr.Check(sizes, &bindings).ok();
  };
  CHECK(!check("table0[k] == 0", s));
  CHECK(check("table0[k % 8] == 0", s));
  CHECK(check("table0[min(k, 7)] == 0", s));
  CHECK(!check("table0[k - 1] == 0", {1, 1, 4, 8, 0}));
  CHECK(!check("table0[b] == 0", {9, 1, 4, 8, 0}));
  CHECK(!check("segment_q[b, q] == 0", s));  // not given
  CHECK(!check("q * 9007199254740992 * 9007199254740992 < k", s));
  CHECK(!check("9007199254740992 * 9007199254740992 < k", s));
  CHECK(check("q * 9007199254740992 < k", s));
  CHECK(!check("q < k", {1, 1, (int64_t{1} << 22) + 1, 1, 0}));
  CHECK(!check("q < k", {1, 1, -1, 1, 0}));
  CountCases(11);
}

// Pairs times nodes, which a run may have to evaluate, are bounded but for expressions of a usual size.
TEST(WorkIsBounded) {
  struct Sizes {
    int terms;  // of 8 nodes with the "or" before it, which the first has not
    int64_t S, T;
    bool fits;
  };
  constexpr int64_t kLongest = MaskExpr::kMaxSize;
  const Sizes kSizes[] = {{1, kLongest, kLongest, true},   {16, kLongest, kLongest, true},
                          {17, kLongest, kLongest, false}, {17, kLongest, 1, true},
                          {17, 0, kLongest, true},         {512, 8192, 8192, true},
                          {512, 8192, 8200, false},        {512, kLongest, kLongest, false}};
  for (const Sizes& one : kSizes) {
    const std::string text = "q - 2 * k < 7" + Repeat(" or q - 2 * k < 7", one.terms - 1);
    MaskExpr expr;
    CHECK(MaskExpr::Parse(text, {}, &expr).ok(), text);
    CHECK(expr.nodes().size() == static_cast<size_t>(8 * one.terms - 1), "nodes: ", expr.nodes().size());
    std::vector<ExprBinding> none;
    const Status status = expr.Check({1, 1, one.S, one.T, 0}, &none);
    CHECK(status.ok() == one.fits, one.terms, " terms, ", one.S, " x ", one.T, ": ", status.message());
    CHECK(one.fits || status.message().find("nodes, or 2^38 nodes for all pairs together") != std::string::npos,
          status.message());
  }
  CountCases(std::size(kSizes));
}

TEST(EqualTablesAreSharedAndHashed) {
  uint8_t bits[6] = {1, 0, 1, 1, 0, 0};
  Tensor tensor;
  tensor.data = bits;
  tensor.dtype = DType::kBool;
  tensor.rank = 1;
  tensor.dims[0] = 6;
  MaskExpr one;
  MaskExpr two;
  CHECK(MaskExpr::Parse("table0[k]", {{"table0", tensor}}, &one).ok());
  CHECK(MaskExpr::Parse("table0[k]", {{"table0", tensor}}, &two).ok());
  CHECK(one.Hash() == two.Hash() && one.operands()[0] == two.operands()[0]);
  bits[5] = 1;
  CHECK(MaskExpr::Parse("table0[k]", {{"table0", tensor}}, &two).ok());
  CHECK(one.Hash() != two.Hash() && one.operands()[0] != two.operands()[0]);
  tensor.rank = 0;
  CHECK(!MaskExpr::Parse("table0[k]", {{"table0", tensor}}, &two).ok());
  tensor.rank = 1;
  tensor.dtype = DType::kF32;
  CHECK(!MaskExpr::Parse("table0[k]", {{"table0", tensor}}, &two).ok());
  CountCases(4);
}

}  // namespace
}  // namespace stof::test
