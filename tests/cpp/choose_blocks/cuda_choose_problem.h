// SPDX-License-Identifier: Apache-2.0
// Problems for tests of choose blocks on a GPU, and what the definition chooses.
#ifndef STOF_TESTS_CPP_CHOOSE_BLOCKS_CUDA_CHOOSE_PROBLEM_H_
#define STOF_TESTS_CPP_CHOOSE_BLOCKS_CUDA_CHOOSE_PROBLEM_H_

#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/cpp/choose_blocks/choose_reference.h"

namespace stof::test::choose {

using attention::BlockSets;
using attention::ChooseKeyBlocks;
using attention::ChooseProblem;

constexpr int kDirections = 4;
constexpr const char* kMasks[] = {"",
                                  "k <= q",
                                  "k <= q and q - k < 500",
                                  "abs(q - k) <= 200 or k < 64",
                                  "(k + h) % 3 != 0 and k <= q + 70",
                                  "q >= 100 and k <= q"};

inline bool Allows(int mask, int64_t q, int64_t k, int64_t h) {
  switch (mask) {
    case 1:
      return k <= q;
    case 2:
      return k <= q && q - k < 500;
    case 3:
      return std::abs(q - k) <= 200 || k < 64;
    case 4:
      return (k + h) % 3 != 0 && k <= q + 70;
    case 5:
      return q >= 100 && k <= q;
    default:
      return true;
  }
}

enum class Padding { kNone, kLeft, kRight };

struct Case {
  int64_t B = 1, H = 4, G = 2, S = 300, T = 900, D = 64, Dv = 0;
  DType dtype = DType::kF16;
  int mask = 0;
  bool offset = false;
  Padding padding = Padding::kNone;
  double distance = 3;  // -ln c
  double low_share = 0.7;
  int64_t block = 128;  // keys of one level
  double softcap = 0, scale_sign = 1;
  bool sink = false, nan = false;
  EmptyRows empty_rows = EmptyRows::kZero;
  // Lengths of the pasts of a cache, by sequence; empty: no cache. Keys behind P + S are NaN.
  std::vector<int64_t> past;
  int64_t P(int64_t b) const { return past.empty() ? (offset ? T - S : 0) : past[static_cast<size_t>(b)]; }
  int64_t KeysOf(int64_t b) const { return past.empty() ? T : P(b) + S; }
  int64_t value_size() const { return Dv == 0 ? D : Dv; }
  float threshold() const { return static_cast<float>(std::exp(-distance)); }
};

inline std::string Describe(const Case& c) {
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " T ", c.T, " D ", c.D, " Dv ", c.value_size(),
              c.dtype == DType::kF16 ? " fp16" : " bf16", " mask '", kMasks[c.mask], "' offset ", c.offset, " padding ",
              static_cast<int>(c.padding), " distance ", c.distance, " block ", c.block, " softcap ", c.softcap,
              " sign ", c.scale_sign, " sink ", c.sink, " nan ", c.nan, " cached ", !c.past.empty());
}

struct Problem {
  Dense dense;
  std::vector<uint8_t> pad, fixed;  // [B, T]; [B, H, S, T] by the mask alone
};

// Keys lie at levels along four directions, by blocks; queries see one direction, 96 neighbours the same one. Values of
// a block are alike, so that a block that is missing shows.
inline Problem Draw(const Case& c, Random* random) {
  Problem p;
  Dense& d = p.dense;
  d.B = c.B, d.H = c.H, d.G = c.G, d.S = c.S, d.T = c.T, d.D = c.D, d.Dv = c.value_size();
  d.scale = static_cast<double>(static_cast<float>(c.scale_sign) / std::sqrt(static_cast<float>(c.D)));
  d.softcap = c.softcap, d.empty_rows = c.empty_rows;
  const double reach = 8, noise = 0.8;
  const auto rounded = [&](double x) { return Rounded(c.dtype, x); };
  for (int64_t row = 0; row < c.B * c.H * c.S; ++row) {
    for (int64_t i = 0; i < c.D; ++i) {
      const double level = i == row % c.S / 96 % kDirections ? reach : 0;
      d.query.push_back(rounded(i < kDirections ? level : noise * random->Unit()));
    }
  }
  for (int64_t bg = 0; bg < c.B * c.G; ++bg) {
    double level[kDirections] = {}, mean = 0;
    for (int64_t k = 0; k < c.T; ++k) {
      if (k % c.block == 0) {
        mean = random->OneIn(2) ? 1 : -1;
        for (double& own : level) {
          const double drawn = (random->Unit() + 1) / 2;
          const double low = -(c.distance + 1 + random->Unit());
          own = k == 0 ? 0 : drawn < c.low_share ? low : drawn < 0.9 ? 0 : -c.distance * drawn;
        }
      }
      const bool exists = k < c.KeysOf(bg / c.G);
      for (int64_t i = 0; i < c.D; ++i) {
        const double x = i < kDirections ? level[i] / (d.scale * reach) : noise * random->Unit();
        d.key.push_back(exists ? rounded(x) : std::numeric_limits<double>::quiet_NaN());
      }
      for (int64_t i = 0; i < d.Dv; ++i) d.value.push_back(rounded(exists ? mean + 0.25 * random->Unit() : 0));
    }
  }
  if (c.nan) d.key[static_cast<size_t>(c.T / 2 * c.D + 7)] = std::numeric_limits<double>::quiet_NaN();
  for (int64_t h = 0; c.sink && h < c.H; ++h) d.sink.push_back(rounded(2.0 * random->Unit()));
  p.pad.assign(static_cast<size_t>(c.B * c.T), 1);
  for (int64_t b = 0; b < c.B && c.padding != Padding::kNone; ++b) {
    const int64_t kept = c.T - random->Range(1, c.T / 2);
    for (int64_t k = 0; k < c.T; ++k) {
      const bool is_real = c.padding == Padding::kRight ? k < kept : k >= c.T - kept;
      p.pad[static_cast<size_t>(b * c.T + k)] = is_real && !random->OneIn(50) ? 1 : 0;
    }
  }
  for (int64_t bh = 0; bh < c.B * c.H; ++bh) {
    for (int64_t q = 0; q < c.S; ++q) {
      for (int64_t k = 0; k < c.T; ++k) {
        const int64_t b = bh / c.H;
        const bool is_allowed = k < c.KeysOf(b) && Allows(c.mask, q + c.P(b), k, bh % c.H);
        p.fixed.push_back(is_allowed ? 1 : 0);
        d.allowed.push_back(is_allowed && p.pad[static_cast<size_t>(b * c.T + k)] != 0 ? 1 : 0);
      }
    }
  }
  return p;
}

inline BlockSets Define(const Case& c, const Problem& p) {
  ChooseProblem problem;
  problem.dense = &p.dense;
  problem.dtype = c.dtype;
  problem.threshold = static_cast<double>(c.threshold());
  problem.fixed = p.fixed;
  problem.pad = c.padding == Padding::kNone ? nullptr : p.pad.data();
  for (int64_t b = 0; b < c.B; ++b) problem.ends.push_back(c.KeysOf(b)), problem.diagonal.push_back(c.P(b));
  // Tiles of these masks have a pair.
  problem.is_listed = [](int64_t, int64_t, int64_t, int64_t) { return false; };
  return ChooseKeyBlocks(problem);
}

}  // namespace stof::test::choose
#endif  // STOF_TESTS_CPP_CHOOSE_BLOCKS_CUDA_CHOOSE_PROBLEM_H_
