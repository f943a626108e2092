// SPDX-License-Identifier: Apache-2.0
// Masks over KV caches: which texts are taken, ranges and distances, and tiles of sequences of different length against
// an evaluator that shares no code with the product's.
#include <algorithm>

#include "plugins/core/mask/cached_mask.h"
#include "tests/cpp/mask/random_expr.h"

namespace stof::test {
namespace {

CachedMask Make(const std::string& text, int64_t window = 0) {
  CachedMask mask;
  const Status status = MakeCachedMask(text, {}, window, &mask);
  CHECK(status.ok(), text, ": ", status.message());
  return mask;
}

TEST(CachedMasksAreCausal) {
  CHECK(Make("").expr.Print() == "k <= q");
  CHECK(Make("k <= q").expr.Print() == "k <= q");
  CHECK(Make("q - k < 4").expr.Print() == "q - k < 4 and k <= q");
  CHECK(Make("k <= q or k < 4").expr.Print() == "(k <= q or k < 4) and k <= q");
}

TEST(MasksOfSlidingWindowCachesEndAtTheWindow) {
  CHECK(Make("", 16).expr.Print() == "k <= q and q - k < 16" && Make("", 16).window_left == 15);
  CHECK(Make("k <= q and q - k < 16", 16).expr.Print() == "k <= q and q - k < 16");
  CHECK(Make("k <= q and q - k < 9", 16).window_left == 8);
  CHECK(Make("k <= q and q - k < 40", 16).window_left == 15);
  CHECK(Make("k <= q and (q - k) % 2 == 0", 16).expr.Print() == "k <= q and (q - k) % 2 == 0 and q - k < 16");
}

TEST(CachedMasksAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"k < T", "the mask reads T"},
      {"pad[b, k]", "run-time operand"},
      {"segment_q[b, q] == segment_k[b, k]", "run-time operand"},
      {"k < lengths[b]", "run-time operand"},
      {"k <", "mask expression"},
  };
  for (const auto& [text, message] : cases) {
    CachedMask mask;
    const Status status = MakeCachedMask(text, {}, 0, &mask);
    CHECK(!status.ok() && status.message().find(message) != std::string::npos, text, ": ", status.message());
  }
}

TEST(MasksOfOneToken) {
  CHECK(Make("q - k < P").of_one_token == nullptr);
  const std::pair<const char*, const char*> cases[] = {
      {"k < 8 or q - k < 512 or q >= P + S - 128", "k <= q"},
      {"q < P + S - 1 or k < 9", "k < 9 and k <= q"},
      {"not (q == P and S == 1) or k % 3 == h", "k % 3 == h and k <= q"},
      {"not (S > 1) and k >= S", "k >= 1 and k <= q"},
      {"q - k < S * 4 and (k < P or k % 2 == 0)", "q - k < 1 * 4 and (k < q or k % 2 == 0) and k <= q"},
      {"S != 1", "False and k <= q"},
      {"q - P <= 0 - S or k == min(S, 3)", "k == min(1, 3) and k <= q"},
  };
  for (const auto& [text, expected] : cases) {
    const CachedMask mask = Make(text);
    CHECK(mask.of_one_token != nullptr, text);
    CHECK(mask.of_one_token->expr.Print() == expected, text, ": ", mask.of_one_token->expr.Print());
  }
  CHECK(!Make(cases[0].first).is_range && Make(cases[0].first).of_one_token->is_range);
  CountCases(std::size(cases));
}

// Pair by pair, for random conditions.
TEST(MasksOfOneTokenAllowTheSame) {
  const int count = Cases(500);
  Random random(31);
  const std::vector<std::string> kParts = {"q >= P + S - 5", "q - P > S",      "k < 3 * S",       "k % 3 == h",
                                           "q == P",         "S * 2 - P < 9",  "not (q < P + S)", "q - k < 7",
                                           "P < k + 9",      "P - q != 0 - S", "k // 4 < S + h",  "min(q, P) + 1 < S",
                                           "P + q > 40",     "S == 1"};
  for (int i = 0; i < count; ++i) {
    std::string text = "S < k + 2";
    for (int part = 0; part < 3; ++part) {
      const std::string other = (random.OneIn(3) ? "not " : "") + ("(" + random.Pick(kParts) + ")");
      text = "(" + text + (random.OneIn(2) ? ") and " : ") or ") + other;
    }
    const CachedMask mask = Make(text);
    CHECK(mask.of_one_token != nullptr && !mask.of_one_token->expr.Uses(ExprOp::kS), text);
    ExprSizes sizes;
    sizes.B = 1, sizes.H = 3, sizes.S = 1;
    for (int pair = 0; pair < 20; ++pair) {
      sizes.P = random.Range(0, 40), sizes.T = sizes.P + 1;
      const int64_t h = random.Range(0, 2), k = random.Range(0, sizes.P);
      CHECK(Allowed(mask.expr, sizes, {}, 0, h, sizes.P, k) ==
                Allowed(mask.of_one_token->expr, sizes, {}, 0, h, sizes.P, k),
            text, " as ", mask.of_one_token->expr.Print(), " at ", h, ", ", sizes.P, ", ", k);
    }
  }
  CountCases(count);
}

TEST(CachedMaskRanges) {
  struct Range {
    const char* text;
    bool is_range;
    int64_t window_left;
    bool is_of_distances;
  };
  const Range cases[] = {
      {"", true, -1, true},
      {"q - k < 5", true, 4, true},
      {"k > q - 5", true, 4, true},
      {"q - k <= 3 * 4 and 20 > q - k", true, 12, true},
      {"k <= q + 1", true, -1, true},
      {"k < q", false, 0, true},                // not the query itself
      {"k <= q - 2", false, 0, true},           // nor its neighbours
      {"abs(q - k) < 4", false, 0, true},       // a range, but no sum
      {"k % 2 == 0", false, 0, false},          // strided keys
      {"q - k < 3 or k < 4", false, 0, false},  // sinks and a window
      {"q // 4 == k // 4", false, 0, false},    // blocks
      {"q - k < S", false, 0, true},            // of the run's size
      {"q - k < P", false, 0, false},           // of the past
      {"q - k < h", false, 0, true},            // by head
      {"(q - k) % 2 == 0", false, 0, true},     // dilated
      {"2 * q - k < 5", false, 0, false},       // no distance
  };
  for (const Range& one : cases) {
    const CachedMask mask = Make(one.text);
    CHECK(mask.is_range == one.is_range, one.text);
    CHECK(!one.is_range || mask.window_left == one.window_left, one.text, ": ", mask.window_left);
    CHECK(IsOfDistances(mask.expr) == one.is_of_distances, one.text);
  }
  CountCases(std::size(cases));
}

// Positions shifted alike: a mask of distances says the same.
TEST(CachedMasksOfDistancesStay) {
  const int count = Cases(2000);
  Random random(23);
  int found = 0;
  const std::vector<std::string> kParts = {"q - k < 5",         "abs(k - q) % 3 == 1", "k <= q",
                                           "q % 2 == k % 2",    "k - q + h > -6",      "k < 7",
                                           "2 * k < q + k",     "max(q, k) - k < 3",   "max(q - k, 3) < 6",
                                           "q * 2 - k * 2 < 9", "min(q, 8) < k",       "(q - k) // 2 == 1"};
  for (int i = 0; i < count; ++i) {
    const std::string text =
        "(" + random.Pick(kParts) + (random.OneIn(2) ? ") and (" : ") or (") + random.Pick(kParts) + ")";
    const CachedMask mask = Make(text);
    if (!IsOfDistances(mask.expr)) continue;
    ++found;
    ExprSizes sizes;
    sizes.B = 1, sizes.H = 4, sizes.S = 40, sizes.T = 40;
    ExprEvaluator evaluator(mask.expr, sizes, {});
    for (int pair = 0; pair < 20; ++pair) {
      const int64_t q = random.Range(0, 19), k = random.Range(0, 19), shift = random.Range(0, 20),
                    h = random.Range(0, 3);
      uint8_t here = 0, there = 0;
      evaluator.Row(0, h, q, k, 1, &here);
      evaluator.Row(0, h, q + shift, k + shift, 1, &there);
      CHECK(here == there, text, " at ", q, ", ", k, " by ", shift);
    }
  }
  CHECK(found > count / 20, found);
  CountCases(found);
}

// Tiles of three sequences, pair by pair; and the device's form with its run-time operand says the same.
TEST(CachedMaskTiles) {
  const int count = Cases(300);
  Random random(29);
  const std::vector<std::string> kTexts = {
      "",          "q - k < 7", "q - k < 5 or k % 4 == h", "k < P or q - k < 2", "(k // 8 + h) % 3 != 0 and q - k < 30",
      "k >= b * 3"};
  constexpr int kM = 8, kN = 32;
  for (int i = 0; i < count; ++i) {
    const CachedMask mask = Make(random.Pick(kTexts));
    ExprSizes sizes;
    sizes.B = 3, sizes.H = 2, sizes.S = random.Range(1, 20);
    std::vector<int32_t> first, ends;
    for (int64_t b = 0; b < sizes.B; ++b) {
      first.push_back(static_cast<int32_t>(random.Range(0, 70)));
      ends.push_back(first.back() + static_cast<int32_t>(random.Range(1, sizes.S)));
      sizes.T = std::max<int64_t>(sizes.T, ends.back());
    }
    std::unique_ptr<BoundCachedMask> bound;
    const Status status = BoundCachedMask::Make(mask.expr, sizes, first.data(), ends.data(), &bound);
    CHECK(status.ok(), status.message());
    Tensor positions = TensorOfShape(DType::kI32, {sizes.B});
    positions.data = first.data();
    std::unique_ptr<BoundDynamicMask> moved;
    const MaskExpr& fixed = mask.on_device->parts.fixed;
    CHECK(BoundDynamicMask::Make(mask.on_device->parts.dynamic, sizes, {{kFirstPositions, positions}}, &moved).ok());
    const MaskParts& prompt = mask.of_first_prompt->parts;
    CHECK(prompt.dynamic.empty() && !prompt.pad, mask.expr.Print(), " of a first prompt: ", prompt.dynamic.Print());
    const int64_t b = random.Range(0, 2), h = random.Range(0, 1);
    const int64_t query = random.Range(0, sizes.S - 1), other = random.Range(0, sizes.S - 1);
    CHECK(Allowed(prompt.fixed, sizes, {}, b, h, query, other) == Allowed(mask.expr, sizes, {}, b, h, query, other),
          mask.expr.Print(), " of a first prompt at ", b, ", ", query, ", ", other);
    const int64_t row0 = random.Range(0, (sizes.S - 1) / kM) * kM, key0 = random.Range(0, (sizes.T - 1) / kN) * kN;
    uint32_t bits[kM], bits_moved[kM];
    const int kind = bound->view()->tile(bound->view()->self, b, h, row0, key0, kM, kN, bits);
    const int kind_moved = moved->view()->tile(moved->view()->self, b, h, row0, key0, kM, kN, bits_moved);
    ExprSizes own = sizes;
    own.P = first[static_cast<size_t>(b)], own.T = ends[static_cast<size_t>(b)];
    for (int r = 0; r < kM && row0 + r < sizes.S; ++r) {
      for (int c = 0; c < kN; ++c) {
        const int64_t key = key0 + c;
        const bool is_key = key < own.T;
        const bool allowed = is_key && Allowed(mask.expr, own, {}, b, h, own.P + row0 + r, key);
        const bool found = kind == 2 || (kind == 1 && (bits[r] >> c & 1u) != 0);
        CHECK(found == allowed, mask.expr.Print(), " at ", b, ", ", row0 + r, ", ", key);
        if (!is_key) continue;
        const bool is_fixed = fixed.empty() || Allowed(fixed, sizes, {}, b, h, row0 + r, key);
        const bool is_dynamic = kind_moved == 2 || (kind_moved == 1 && (bits_moved[r] >> c & 1u) != 0);
        CHECK((is_fixed && is_dynamic) == allowed, mask.expr.Print(), " on a device at ", b, ", ", row0 + r, ", ", key);
      }
    }
  }
  CountCases(count);
}

}  // namespace
}  // namespace stof::test
