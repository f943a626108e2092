// SPDX-License-Identifier: Apache-2.0
// The relative terms of a tile of scores as the fp32 kernels compute them, by the code of the device on an emulated
// warp: numbers in two parts, factors and columns.
#include <cstdint>
#include <vector>

#include "cuda/attention/relative/split_products.cuh"
#include "tests/cpp/check.h"
#include "tests/cpp/emulated_warp/bf16_words.h"

namespace stof::test {
namespace {

using cuda::EmulatedBf16;

constexpr int kHead = 64, kPairs = kHead / 32;

// Numbers in two parts: products of the low parts are left out.
struct Split {
  std::vector<float> high, low;
  Split(Random* random, int64_t count) : high(DrawIntegers(random, count)), low(DrawIntegers(random, count)) {
    for (float& x : low) x /= 16.0f;
  }
  float Dot(const Split& other, int64_t row, int64_t other_row) const {
    float sum = 0.0f;
    for (int d = 0; d < kHead; ++d) {
      const auto at = static_cast<size_t>(row * kHead + d), of = static_cast<size_t>(other_row * kHead + d);
      sum += high[at] * (other.high[of] + other.low[of]) + low[at] * other.high[of];
    }
    return sum;
  }
  uint32_t Pair(bool is_low, int64_t row, int d) const {
    const std::vector<float>& from = is_low ? low : high;
    return Word(from[static_cast<size_t>(row * kHead + d)], from[static_cast<size_t>(row * kHead + d + 1)]);
  }
};

TEST(RelativeBandsOfSplitNumbers) {
  Random random(57);
  constexpr int kS = 40, kT = 130, kRow = 16, kKey = 64;
  constexpr float kScale = 0.5f;
  const int64_t expanded = cuda::ExpandedRows(kS, kT);
  const Split query(&random, int64_t{cuda::PaddedQueries(kS)} * kHead), rows(&random, expanded * kHead);
  const Split key(&random, int64_t{cuda::PaddedKeys(kT)} * kHead);
  const std::vector<float> row_bias = DrawIntegers(&random, expanded);
  std::vector<float> factor, key_factor;
  for (int64_t i = 0; i < expanded; ++i) factor.push_back(static_cast<float>(1 << i % 3));
  for (int i = 0; i < 64; ++i) key_factor.push_back(static_cast<float>(1 << i % 4));
  std::vector<uint16_t> fragments(static_cast<size_t>(2 * expanded * kHead));
  for (int64_t at = 0; at < expanded * kHead; ++at) {
    const int lane = static_cast<int>(at / 8 % 32), i = static_cast<int>(at % 8);
    const int pair = static_cast<int>(at / 256 % kPairs);
    const int64_t block = at / 256 / kPairs, row = 8 * block + cuda::FragmentRow(lane);
    const auto from = static_cast<size_t>(row * kHead + 32 * pair + cuda::FragmentColumn(lane, i));
    for (int plane = 0; plane < 2; ++plane) {
      fragments[static_cast<size_t>(cuda::FragmentIndex(block, 2 * pair + plane, 2 * kPairs, lane) * 8 + i)] =
          ToBf16(plane == 0 ? rows.high[from] : rows.low[from]);
    }
  }
  cuda::AttentionParams p;
  p.B = p.H = p.G = 1, p.S = kS, p.T = kT;
  cuda::BandTerm term;
  term.rows = fragments.data(), term.row_bias = row_bias.data(), term.factor = factor.data();
  for (const bool of_keys : {false, true}) {
    std::vector<float> got(16 * 64);
    emulated::Warp::Run([&](int lane) {
      const cuda::RelativeScores<1> scores(p, 0, 0, kRow, kKey, lane);
      const int first = scores.First(), g = lane / 4, t = lane % 4;
      const uint32_t* const from = cuda::WindowRows<2 * kPairs>(term, 0, first, lane);
      const cuda::BandScale by = {cuda::WindowFactor(term, 0, first), cuda::WindowRowBias(term, 0, first), kScale};
      const float row_scale[1][2] = {{2.0f * kScale, 4.0f * kScale}};
      float s[1][8][4] = {};
      const auto read_queries = [&](int k, uint32_t (&high)[1][4], uint32_t (&low)[1][4]) {
        for (int word = 0; word < 4; ++word) {
          const int row = kRow + g + word % 2 * 8, d = 16 * k + word / 2 * 8 + 2 * t;
          high[0][word] = query.Pair(false, row, d), low[0][word] = query.Pair(true, row, d);
        }
      };
      const auto read_keys = [&](int k, int j, uint32_t (&high)[4], uint32_t (&low)[4]) {
        for (int word = 0; word < 4; ++word) {
          const int row = kKey + 8 * (j + word / 2) + g, d = 16 * k + word % 2 * 8 + 2 * t;
          high[word] = key.Pair(false, row, d), low[word] = key.Pair(true, row, d);
        }
      };
      if (of_keys) {
        scores.AddKeyBand(
            [&](int j, float (&z)[2][2][4]) {
              cuda::MultiplySplitKeys<EmulatedBf16, kHead, 1>(from, by, j, lane, key_factor.data(), read_keys, z);
            },
            s);
      } else {
        scores.AddQueryBand(
            [&](int u, float (&x)[1][2][4]) {
              cuda::MultiplySplitQueries<EmulatedBf16, kHead, 1>(from, by, u, lane, row_scale, read_queries, x);
            },
            s);
      }
      for (int j = 0; j < 8; ++j) {
        for (int e = 0; e < 4; ++e) got[static_cast<size_t>((g + e / 2 * 8) * 64 + 8 * j + 2 * t + e % 2)] = s[0][j][e];
      }
    });
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 64; ++c) {
        const auto row = static_cast<size_t>(cuda::ExpandedRow(kRow + r, kKey + c, kS));
        const float product =
            of_keys ? key.Dot(rows, kKey + c, static_cast<int64_t>(row)) * key_factor[static_cast<size_t>(c)]
                    : query.Dot(rows, kRow + r, static_cast<int64_t>(row)) * (r < 8 ? 2.0f : 4.0f);
        const float want = kScale * (product * factor[row] + row_bias[row]);
        CHECK(got[static_cast<size_t>(r * 64 + c)] == want, of_keys ? "of keys " : "of queries ", r, " ", c, ": ",
              got[static_cast<size_t>(r * 64 + c)], ", expected ", want);
      }
    }
  }
}

}  // namespace
}  // namespace stof::test
