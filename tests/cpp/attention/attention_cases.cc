// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <tuple>

#include "tests/cpp/attention/attention_problem.h"

namespace stof::test::attention {
std::vector<Case> DrawnCases(int count) {
  Random random(2024);
  Deck<int64_t> rows({1, 2, 3, 4, 5, 6, 7, 47, 48, 49, 63, 64, 65, 95, 96, 97, 130}, &random);
  Deck<int64_t> keys({1, 15, 16, 17, 63, 64, 65, 129, 300, 0}, &random);  // 0: as many as rows
  Deck<int64_t> sizes({1, 7, 8, 16, 20, 64, 80, 96, 128, 192, 256}, &random);
  Deck<int64_t> value_sizes({0, 0, 0, 1, 5, 8, 16, 24, 64, 72, 128, 256}, &random);  // 0: as D
  Deck<int> groups({0, 1, 2}, &random);
  Deck<int64_t> heads({2, 4, 6}, &random);
  Deck<int64_t> batches({2, 2, 1, 3}, &random);
  Deck<DType> dtypes({DType::kF32, DType::kF32, DType::kF16, DType::kBF16}, &random);
  Deck<Arrangement> arrangements(kArrangements, &random);
  Deck<int> masks({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kAll, Pad::kRandom}, &random);
  Deck<Bias> biases(
      {Bias::kNone, Bias::kNone, Bias::kNone, Bias::kPlain, Bias::kLowest, Bias::kForbids, Bias::kFarBelow}, &random);
  Deck<uint32_t> broadcasts({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, &random);
  Deck<int64_t> relatives({0, 0, 0, 1, 3, 33, 257, 999}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  Deck<float> softcaps({0, 0, 0, 2.5f, 30.0f}, &random);
  Deck<float> spreads({1, 1, 4, 30}, &random);
  Deck<Poison> poisons({Poison::kNone, Poison::kForbidden, Poison::kForbidden, Poison::kOneKey}, &random);
  Deck<std::pair<int, int>> tiles({{0, 0}, {0, 0}, {0, 0}, {24, 64}, {48, 32}, {5, 96}, {1, 32}, {64, 128}, {96, 256}},
                                  &random);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c;
    c.B = batches.Deal();
    c.H = heads.Deal();
    const int group = groups.Deal();
    c.G = group == 0 ? c.H : group == 1 ? c.H / 2 : 1;
    c.S = rows.Deal();
    c.T = keys.Deal();
    if (c.T == 0) c.T = c.S;
    c.D = sizes.Deal();
    c.Dv = value_sizes.Deal();
    if (c.Dv == 0) c.Dv = c.D;
    c.dtype = dtypes.Deal();
    for (Arrangement& arrangement : c.arrangement) arrangement = arrangements.Deal();
    c.offset = c.T >= c.S && random.OneIn(2);
    c.mask = masks.Deal();
    c.pad = pads.Deal();
    c.bias = biases.Deal();
    c.bias_wide = random.OneIn(2);
    if (c.bias != Bias::kNone) c.bias_broadcast = broadcasts.Deal();
    c.relative = relatives.Deal();
    c.relative_shared = random.OneIn(4);
    c.sink = random.OneIn(4);
    c.empty_rows = policies.Deal();
    if (c.sink) c.empty_rows = EmptyRows::kZero;
    c.softcap = softcaps.Deal();
    c.spread = spreads.Deal();
    c.rising = random.OneIn(4);
    // An empty row attends every key under this policy, also those that are forbidden to all.
    c.poison = c.empty_rows == EmptyRows::kAll ? Poison::kNone : poisons.Deal();
    c.shifted = random.OneIn(3);
    std::tie(c.m, c.n) = tiles.Deal();
    cases.push_back(c);
  }
  return cases;
}

std::vector<Case> ListedCases() {
  std::vector<Case> cases;
  const auto add = [&cases](int64_t H, int64_t G, int64_t S, int64_t T, int64_t D, int64_t Dv) -> Case& {
    Case c;
    c.H = H, c.G = G, c.S = S, c.T = T, c.D = D, c.Dv = Dv;
    cases.push_back(c);
    return cases.back();
  };
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    // Few queries with many keys, which are split and combined: several query heads a KV head, and one.
    Case* c = &add(4, 1, 1, 2100, 20, 24);
    c->dtype = dtype, c->pad = Pad::kLeft, c->rising = true;
    c = &add(4, 2, 4, 1030, 64, 64);
    c->dtype = dtype, c->offset = true, c->mask = 4, c->pad = Pad::kRandom, c->poison = Poison::kForbidden;
    c = &add(2, 2, 2, 4200, 16, 16);
    c->dtype = dtype, c->B = 1, c->bias = Bias::kForbids, c->bias_broadcast = 4;
    // Keys that exceed every cache are packed first.
    c = &add(2, 1, 7, 640, 256, 40);
    c->dtype = dtype, c->mask = 3, c->empty_rows = EmptyRows::kAll, c->pad = Pad::kAll;
    c = &add(2, 2, 97, 640, 256, 256);
    c->dtype = dtype, c->B = 1, c->rising = true, c->softcap = 30;
    c = &add(2, 1, 65, 300, 24, 24);
    c->dtype = dtype, c->bias = Bias::kFarBelow, c->bias_wide = true, c->bias_broadcast = 3, c->spread = 4;
    c = &add(2, 2, 2, 300, 24, 24);
    c->dtype = dtype, c->bias = Bias::kFarBelow, c->bias_wide = true, c->spread = 4;
    c = &add(4, 2, 130, 300, 16, 16);
    c->dtype = dtype, c->relative = 65, c->offset = true, c->mask = 4, c->pad = Pad::kLeft, c->sink = true;
    c = &add(4, 2, 3, 600, 16, 16);
    c->dtype = dtype, c->relative = 1199, c->offset = true, c->sink = true, c->spread = 30;
    // The largest head against the smallest.
    c = &add(4, 2, 49, 65, 256, 1);
    c->dtype = dtype, c->mask = 1;
    c = &add(4, 4, 49, 65, 1, 256);
    c->dtype = dtype, c->mask = 2;
    for (const EmptyRows policy : {EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}) {
      // All rows fully masked: by the static mask, by padding, by the bias; and long rows, whose mean is a long sum.
      c = &add(4, 2, 97, 97, 20, 20);
      c->dtype = dtype, c->mask = 13, c->empty_rows = policy;
      c = &add(4, 4, 6, 300, 16, 24);
      c->dtype = dtype, c->pad = Pad::kAll, c->mask = 5, c->empty_rows = policy;
      c = &add(2, 1, 3, 1500, 8, 8);
      c->dtype = dtype, c->pad = Pad::kAll, c->empty_rows = policy;
      c = &add(2, 2, 64, 129, 64, 64);
      c->dtype = dtype, c->bias = Bias::kForbids, c->bias_broadcast = 8, c->empty_rows = policy;
      // Rows that mask and padding leave no key: the bias forbids some keys of some, and all keys of others.
      c = &add(2, 2, 67, 129, 64, 64);
      c->dtype = dtype, c->mask = 13, c->bias = Bias::kForbids, c->bias_broadcast = 8, c->empty_rows = policy;
      c = &add(4, 2, 3, 300, 24, 24);
      c->dtype = dtype, c->pad = Pad::kAll, c->bias = Bias::kForbids, c->empty_rows = policy;
      c = &add(4, 2, 70, 140, 40, 40);
      c->dtype = dtype, c->pad = Pad::kAll, c->mask = 5, c->relative = 31, c->empty_rows = policy;
      // Every score absorbed by the lowest number: such a row has keys, and averages them.
      c = &add(2, 2, 13, 129, 16, 16);
      c->dtype = dtype, c->bias = Bias::kLowest, c->bias_broadcast = 8, c->empty_rows = policy;
    }
  }
  for (int mask = 0; mask < kMasks; ++mask) {
    // Every mask on several tiles, with queries before and at the end of the keys, and keys that no query may attend.
    Case* c = &add(4, 2, 130, 300, 16, 16);
    c->mask = mask, c->poison = Poison::kForbidden, c->offset = true;
    c = &add(2, 2, 97, 65, 24, 8);
    c->mask = mask, c->poison = Poison::kForbidden, c->pad = Pad::kRight, c->empty_rows = EmptyRows::kMean;
    c = &add(4, 1, 3, 129, 80, 80);
    c->mask = mask, c->poison = Poison::kForbidden, c->pad = Pad::kLeft, c->softcap = 2.5f, c->offset = true;
  }
  return cases;
}

std::vector<Case> LargeScoreCases(int count) {
  Random random(37);
  Deck<Scores> scores({Scores::kSteps, Scores::kEqual, Scores::kSpikes, Scores::kSpikes, Scores::kUp, Scores::kDown},
                      &random);
  Deck<int> exponents({-126, -60, 0, 4, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27, 28, 29, 30, 31, 34, 40, 70, 100, 124},
                      &random);
  Deck<DType> dtypes({DType::kF32, DType::kF16, DType::kBF16}, &random);
  Deck<int64_t> rows({1, 2, 5, 16, 65, 130, 300}, &random);
  Deck<int64_t> keys({17, 64, 200, 333, 1100, 2300}, &random);
  Deck<int64_t> sizes({8, 16, 64, 72, 128, 192, 256}, &random);
  Deck<int> masks({0, 0, 0, 1, 3, 4, 5, 7, 9, 11}, &random);
  Deck<Pad> pads({Pad::kNone, Pad::kNone, Pad::kLeft, Pad::kRight, Pad::kRandom}, &random);
  Deck<EmptyRows> policies({EmptyRows::kZero, EmptyRows::kNan, EmptyRows::kMean, EmptyRows::kAll}, &random);
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Case c;
    c.H = 4, c.G = random.OneIn(2) ? 4 : 2;
    c.S = rows.Deal(), c.T = keys.Deal(), c.D = c.Dv = sizes.Deal();
    if (c.S > 100 && c.T > 400) c.B = 1, c.H = c.G = 2;
    c.dtype = dtypes.Deal();
    c.scores = scores.Deal(), c.exponent = exponents.Deal();
    if (c.dtype == DType::kF16 && c.scores == Scores::kSpikes) c.exponent = std::max(-20, std::min(c.exponent, 30));
    c.mask = masks.Deal();
    c.offset = c.mask == 1 && c.T >= c.S;
    c.pad = pads.Deal();
    c.sink = random.OneIn(4);
    c.empty_rows = c.sink ? EmptyRows::kZero : policies.Deal();
    if (random.OneIn(5)) c.bias = Bias::kForbids, c.bias_wide = true, c.bias_broadcast = 5;
    if (random.OneIn(8)) c.softcap = 30;
    cases.push_back(c);
  }
  return cases;
}
}  // namespace stof::test::attention
