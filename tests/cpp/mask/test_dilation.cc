// SPDX-License-Identifier: Apache-2.0
// Dilated masks: which ones are found, that the residue mask agrees on every pair, and where the classes lie in memory.
#include "plugins/core/mask/dilation.h"
#include "plugins/core/ops/attention.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

ResidueMask Find(const std::string& text) {
  MaskExpr expr;
  const Status status = MaskExpr::Parse(text, {}, &expr);
  CHECK(status.ok(), text, ": ", status.message());
  return FindResidues(expr);
}

TEST(ResiduesAreFound) {
  const std::pair<const char*, int64_t> cases[] = {
      {"(q - k) % 2 == 0", 2},
      {"abs(q - k) <= 256 and (q - k) % 2 == 0", 2},
      {"abs(q - k) % 7 == 0 and k <= q", 7},
      {"0 == (k - q + 10) % 5 and q - k < 4 * S", 5},
      {"q % 4 == k % 4", 4},
      {"(q + 1) % 4 == (k + 5) % 4 and not q < k", 4},
      {"(q - k) % 3 == 0 and (q - k) % 2 == 0", 3},
      {"(q - k) % 2 == 0 and min(q - k, 3) % 2 == 1", 2},
      {"(q - k) % 2 == 0 and q * 2 < k * 2 + T - P", 2},
      {"(q - k) % 2 == 1", 1},                         // of other remainders
      {"(q - k) % 1 == 0", 1},                         // all
      {"(q - k + 1) % 2 == 0", 1},                     // of other remainders
      {"(2 * q - 2 * k) % 4 == 0", 1},                 // the coefficients are not looked into
      {"(q + k) % 2 == 0", 1},                         // a sum
      {"(q - k + h) % 2 == 0", 1},                     // by head
      {"(q - k) % 2 == 0 or k < 4", 1},                // no conjunct
      {"(q - k) % 2 == 0 and k < 4", 1},               // remainders differ
      {"(q - k) % 2 == 0 and q // 64 == k // 64", 1},  // remainders differ
      {"(q - k) % 2 == 0 and q - k < h", 1},           // heads differ
      {"(q - k) % 2 == 0 and q - k < b", 1},           // batches differ
      {"abs(q - 5) % 4 == k % 4", 1},                  // an absolute value of something else
      {"q % 4 == k % 2", 1},
      {"abs(q - k) <= 12 and (q - k) % 2 == 0", 2},
      {"abs(q - k) < 12 and (q - k) % 2 == 0", 1},     // a narrow window
      {"abs(k - q) <= 256 and (q - k) % 64 == 0", 1},  // a narrow window
      {"k <= q", 1},
      {"True", 1},
  };
  for (const auto& [text, modulus] : cases) CHECK(Find(text).modulus == modulus, text, ": ", Find(text).modulus);
  CountCases(std::size(cases));
}

// Pair by pair, with the evaluator that shares no code with the product's.
TEST(ResiduesSayTheSame) {
  const int count = Cases(3000);
  Random random(11);
  int64_t found = 0;
  const std::vector<std::string> kRest = {"abs(q - k) <= 31",       "k <= q",           "q - k < S",
                                          "k - q > -T or q < k",    "not (q - k < 6)",  "max(q - k, k - q) // 3 < 4",
                                          "min(q - k, P) <= P - 1", "-(q - k) % 4 != 1"};
  for (int i = 0; i < count; ++i) {
    const int64_t m = random.Range(2, 5);
    ExprSizes sizes = {2, 2, m * random.Range(1, 9), m * random.Range(1, 9), 0};
    if (sizes.T >= sizes.S && random.OneIn(2)) sizes.P = sizes.T - sizes.S;
    std::string text = random.OneIn(2) ? "(q - k) % " + std::to_string(m) + " == 0"
                                       : "k % " + std::to_string(m) + " == q % " + std::to_string(m);
    // Drawn ones seldom leave remainders alone, and then must be refused.
    const std::string rest =
        random.OneIn(3) ? MakeRandomMask(&random, {2, 2, sizes.S, sizes.T, sizes.P}, false).text : random.Pick(kRest);
    if (rest.find("table") != std::string::npos) continue;
    text = random.OneIn(2) ? text + " and (" + rest + ")" : "(" + rest + ") and " + text;
    MaskExpr whole, parsed;
    CHECK(MaskExpr::Parse(text, {}, &whole).ok(), text);
    const ResidueMask residues = FindResidues(whole);
    if (residues.modulus == 1) continue;
    CHECK(residues.modulus == m, text, ": ", residues.modulus);
    const MaskExpr& part = residues.expr;
    CHECK(MaskExpr::Parse(part.Print(), {}, &parsed).ok() && parsed.Print() == part.Print(), text, " -> ",
          part.Print());
    ++found;
    const ExprSizes own = {2, 2, sizes.S / m, sizes.T / m, sizes.P / m};
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t q = sizes.P; q < sizes.P + sizes.S; ++q) {
        for (int64_t k = 0; k < sizes.T; ++k) {
          const bool want = Allowed(whole, sizes, {}, b, 1, q, k);
          const bool got = q % m == k % m && Allowed(part, own, {}, b, 1, q / m, k / m);
          CHECK(want == got, text, " -> ", part.Print(), " at q ", q, " k ", k, ": ", got);
        }
      }
    }
  }
  CHECK(found > count / 4, found, " of ", count);
  CountCases(found);
}

// Batches, heads and positions of the parts reach each element of the whole once.
TEST(ResiduesKeepTheirPlaces) {
  struct Shape {
    int64_t B, H, G;
    bool heads_first[4];  // BHSD, else BSHD
    bool split;
  };
  const Shape shapes[] = {
      {1, 4, 4, {true, true, true, true}, true},     {3, 4, 4, {true, true, true, true}, true},
      {1, 4, 4, {false, false, true, false}, true},  {1, 4, 2, {true, true, true, true}, true},
      {1, 4, 4, {true, false, true, false}, true},   {3, 4, 2, {true, true, true, true}, true},
      {3, 4, 2, {false, false, false, false}, true}, {3, 4, 2, {true, true, true, false}, false},
      {2, 1, 1, {false, false, false, false}, true}, {2, 1, 1, {true, true, true, true}, true},
  };
  std::shared_ptr<const AttentionMask> mask;
  CHECK(MakeAttentionMask("abs(q - k) <= 50 and (q - k) % 3 == 0", {}, &mask).ok());
  for (const Shape& shape : shapes) {
    AttentionArgs args;
    args.shape = {shape.B, shape.H, shape.G, 192, 384, 8, 8};
    const auto strides = [&](int i, int64_t heads, int64_t length) {
      return shape.heads_first[i] ? Strides{heads * length * 8, length * 8, 8}
                                  : Strides{heads * length * 8, 8, heads * 8};
    };
    args.query.stride = strides(0, args.shape.H, args.shape.S),
    args.key.stride = strides(1, args.shape.G, args.shape.T);
    args.value.stride = strides(2, args.shape.G, args.shape.T),
    args.output.stride = strides(3, args.shape.H, args.shape.S);
    const AttentionArgs whole = args;
    ExprSizes sizes = {args.shape.B, args.shape.H, args.shape.S, args.shape.T, 192};
    CHECK(SplitByResidue(*mask, &args, &sizes) == shape.split);
    if (!shape.split) continue;
    CHECK(args.shape.S == 64 && args.shape.T == 128 && sizes.S == 64 && sizes.T == 128 && sizes.P == 64);
    CHECK(args.shape.B * args.shape.H == 3 * whole.shape.B * whole.shape.H &&
          args.shape.H / args.shape.G == whole.shape.H / whole.shape.G);
    const auto at = [](const Strides& s, int64_t b, int64_t h, int64_t i) { return b * s.b + h * s.h + i * s.s; };
    const int64_t group = args.shape.H / args.shape.G;
    std::vector<int> seen(static_cast<size_t>(whole.shape.B * whole.shape.H * whole.shape.S), 0);
    for (int64_t b = 0; b < args.shape.B; ++b) {
      for (int64_t h = 0; h < args.shape.H; ++h) {
        for (int64_t i = 0; i < args.shape.S; ++i) {
          // Which query of the whole it is, by where its output goes.
          int64_t from = -1, head = 0, batch = 0;
          for (batch = 0; batch < whole.shape.B && from < 0; ++batch) {
            for (head = 0; head < whole.shape.H && from < 0; ++head) {
              for (int64_t q = 0; q < whole.shape.S && from < 0; ++q) {
                if (at(whole.output.stride, batch, head, q) == at(args.output.stride, b, h, i)) from = q;
              }
            }
          }
          --head, --batch;
          CHECK(from >= 0 && from / 3 == i);
          ++seen[static_cast<size_t>((batch * whole.shape.H + head) * whole.shape.S + from)];
          CHECK(at(args.query.stride, b, h, i) == at(whole.query.stride, batch, head, from));
          const int64_t key = i + 7;
          for (const auto& [own, all] :
               {std::pair(args.key.stride, whole.key.stride), std::pair(args.value.stride, whole.value.stride)}) {
            CHECK(at(own, b, h / group, key) == at(all, batch, head / group, 3 * key + from % 3));
          }
        }
      }
    }
    for (const int times : seen) CHECK(times == 1);
  }
  // Problems that cannot be strided are not split.
  const auto refuses = [&mask](auto change) {
    AttentionArgs args;
    args.shape = {1, 1, 1, 192, 192, 8, 8};
    ExprSizes sizes = {1, 1, 192, 192, 0};
    change(&args, &sizes);
    const AttentionArgs before = args;
    const bool refused = !SplitByResidue(*mask, &args, &sizes);
    return refused && args.shape.S == before.shape.S && args.shape.B == before.shape.B &&
           args.query.stride.s == before.query.stride.s;
  };
  float number = 0;
  CHECK(!refuses([](AttentionArgs*, ExprSizes*) {}));
  CHECK(refuses([](AttentionArgs* args, ExprSizes*) { args->shape.S = 193; }));
  CHECK(refuses([](AttentionArgs* args, ExprSizes*) { args->shape.T = 190; }));
  CHECK(refuses([](AttentionArgs*, ExprSizes* sizes) { sizes->P = 1; }));
  CHECK(refuses([](AttentionArgs* args, ExprSizes*) { args->shape.S = 189; }));
  CHECK(refuses([&](AttentionArgs* args, ExprSizes*) { args->output.lse = &number; }));
  CHECK(refuses([&](AttentionArgs* args, ExprSizes*) { args->scores.bias.data = &number; }));
  CHECK(refuses([&](AttentionArgs* args, ExprSizes*) { args->scores.relative_bias.table = &number; }));
  CHECK(refuses([](AttentionArgs* args, ExprSizes*) { args->mask.empty_rows = EmptyRows::kMean; }));
  CHECK(refuses([&](AttentionArgs* args, ExprSizes*) { args->shape.B = 2, args->scores.sink.data = &number; }));
  CountCases(static_cast<int64_t>(std::size(shapes)) + 10);
}

}  // namespace
}  // namespace stof::test
