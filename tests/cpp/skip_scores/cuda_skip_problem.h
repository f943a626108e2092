// SPDX-License-Identifier: Apache-2.0
// Problems for tests of skip by score on a GPU, and the definition in docs/reference/operators.md: in double precision,
// with the tiles of a scheduled kernel in its order, by groups of 64 query rows.
#ifndef STOF_TESTS_CPP_SKIP_SCORES_CUDA_SKIP_PROBLEM_H_
#define STOF_TESTS_CPP_SKIP_SCORES_CUDA_SKIP_PROBLEM_H_

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "cuda/attention/kernel_table.h"
#include "cuda/attention/sm90/api.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/mask/block_mask.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"

namespace stof::test::skip {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kGroup = 64;              // query rows that decide together
constexpr double kNear = 1e-3;              // distances from the threshold, in nats, that rounding may bridge
constexpr double kLag = 9.704060527839234;  // 14 ln 2: the row max is raised where a score is so far above it
constexpr int kDirections = 4;              // groups of queries see a key at so many different levels
constexpr const char* kMasks[] = {
    "",
    "k <= q",
    "k <= q and q - k < 300",
    "abs(q - k) <= 200 or k < 64",
    "(k + h) % 3 != 0 and k <= q + 70",
    "q >= 100 and k <= q",
};

inline bool Allows(int mask, int64_t q, int64_t k, int64_t h) {
  switch (mask) {
    case 1:
      return k <= q;
    case 2:
      return k <= q && q - k < 300;
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
  int64_t B = 1, H = 4, G = 2, S = 300, T = 900, D = 64;
  DType dtype = DType::kF16;
  int mask = 0;
  bool offset = false;
  Padding padding = Padding::kNone;
  double distance = 2;  // ln(T / c); 0 stands for c above T
  double low_share = 0.6, middle_share = 0.1;
  int64_t block = 64;  // keys of one level
  double rise = 0;     // nats from the first key to the last
  double softcap = 0;
  bool sink = false, nan = false;
  int64_t P() const { return offset ? T - S : 0; }
  float threshold() const {
    return distance == 0 ? 3.0f * static_cast<float>(T)
                         : static_cast<float>(static_cast<double>(T) * std::exp(-distance));
  }
};

inline std::string Describe(const Case& c) {
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " T ", c.T, " D ", c.D,
              c.dtype == DType::kF16 ? " fp16" : " bf16", " mask '", kMasks[c.mask], "' offset ", c.offset, " padding ",
              static_cast<int>(c.padding), " distance ", c.distance, " block ", c.block, " rise ", c.rise, " softcap ",
              c.softcap, " sink ", c.sink, " nan ", c.nan);
}

// Keys lie at levels along four directions, block by block: level 0, below the threshold, or around it. Queries of a
// group see one direction. Values of a block are alike, so that a block that is missing shows.
struct Problem {
  std::vector<double> query, key, value, sink;
  std::vector<uint8_t> pad;    // [B, T]
  std::vector<double> scores;  // [B, H, S, T]; -inf where forbidden
  double magnitude = 0;        // the largest |q| |k| scale
};

inline Problem Draw(const Case& c, Random* random) {
  Problem p;
  const double scale = 1 / std::sqrt(static_cast<double>(c.D)), noise = 0.5, reach = 8;
  const auto rounded = [&](double x) { return Rounded(c.dtype, x); };
  p.query.resize(static_cast<size_t>(c.B * c.H * c.S * c.D));
  p.key.resize(static_cast<size_t>(c.B * c.G * c.T * c.D));
  p.value.resize(p.key.size());
  for (size_t i = 0; i < p.query.size(); ++i) {
    const auto d = static_cast<int64_t>(i) % c.D, q = static_cast<int64_t>(i) / c.D % c.S;
    p.query[i] = rounded(d < kDirections ? (d == q / kGroup % kDirections ? reach : 0) : noise * random->Unit() * 1.7);
  }
  for (int64_t bg = 0; bg < c.B * c.G; ++bg) {
    double level[kDirections] = {}, mean = 0;
    for (int64_t k = 0; k < c.T; ++k) {
      if (k % c.block == 0) {
        mean = random->OneIn(2) ? 1 : -1;
        for (double& own : level) {
          const double drawn = (random->Unit() + 1) / 2;
          own = k == 0 || drawn >= c.low_share + c.middle_share ? 0
                : drawn < c.low_share                           ? -(c.distance + 2.5)
                                                                : -(c.distance - 0.8 * random->Unit());
        }
      }
      const double risen = c.rise * static_cast<double>(k) / static_cast<double>(c.T);
      for (int64_t d = 0; d < c.D; ++d) {
        const auto at = static_cast<size_t>((bg * c.T + k) * c.D + d);
        p.key[at] = rounded(d < kDirections ? (level[d] + risen) / (scale * reach) : noise * random->Unit() * 1.7);
        p.value[at] = rounded(mean + 0.25 * random->Unit());
      }
    }
  }
  p.pad.assign(static_cast<size_t>(c.B * c.T), 1);
  for (int64_t b = 0; b < c.B && c.padding != Padding::kNone; ++b) {
    const int64_t kept = c.T - random->Range(1, c.T / 2);
    for (int64_t k = 0; k < c.T; ++k) {
      const bool is_real = c.padding == Padding::kRight ? k < kept : k >= c.T - kept;
      p.pad[static_cast<size_t>(b * c.T + k)] = is_real ? 1 : 0;
    }
  }
  if (c.nan) p.key[static_cast<size_t>(c.T / 2 * c.D + 7)] = std::numeric_limits<double>::quiet_NaN();
  for (int64_t h = 0; c.sink && h < c.H; ++h) p.sink.push_back(rounded(2.0 * random->Unit()));
  p.scores.resize(static_cast<size_t>(c.B * c.H * c.S * c.T));
  for (int64_t bh = 0; bh < c.B * c.H; ++bh) {
    const int64_t b = bh / c.H, h = bh % c.H, g = b * c.G + h / (c.H / c.G);
    for (int64_t q = 0; q < c.S; ++q) {
      const double* const row = &p.query[static_cast<size_t>((bh * c.S + q) * c.D)];
      for (int64_t k = 0; k < c.T; ++k) {
        double& score = p.scores[static_cast<size_t>((bh * c.S + q) * c.T + k)];
        score = -kInf;
        if (!Allows(c.mask, q + c.P(), k, h) || p.pad[static_cast<size_t>(b * c.T + k)] == 0) continue;
        const double* const column = &p.key[static_cast<size_t>((g * c.T + k) * c.D)];
        double dot = 0, size = 0;
        for (int64_t d = 0; d < c.D; ++d) dot += row[d] * column[d], size += std::abs(row[d] * column[d]);
        score = c.softcap > 0 ? c.softcap * std::tanh(dot * scale / c.softcap) : dot * scale;
        p.magnitude = std::max(p.magnitude, std::isnan(size) ? 0 : size * scale);
      }
    }
  }
  return p;
}

// What a kernel with tiles of so many rows and keys must give.
struct Answer {
  std::vector<double> output, lse;  // NaN where a row is NaN
  std::vector<double> open;         // [B, H, S]: the share of a row's weights in tiles that may go either way
  uint64_t scored = 0, skipped = 0, may_score = 0, may_skip = 0;
  int64_t tiles = 0, untested = 0, near = 0;
};

// The entries of the tile list that the work tile of each group has, [B * H, groups of a head]: all of its tile row, or
// in a half tile those from the first to the last with a pair of the group.
struct Entries {
  int32_t begin, end;
};
inline std::vector<Entries> FindEntries(const Case& c, const BlockMask& block, const cuda::TileSchedule& schedule) {
  const int64_t groups = (c.S + kGroup - 1) / kGroup, of_row = block.m / kGroup;
  std::vector<Entries> entries(static_cast<size_t>(c.B * c.H * groups));
  for (const cuda::WorkTile& tile : schedule.tiles) {
    const int64_t bh = tile.index / block.rows, first = tile.index % block.rows * of_row;
    const int32_t half = cuda::SubtileOf(tile);
    for (int64_t own = 0; own < of_row && first + own < groups; ++own) {
      if (half >= 0 && half != own) continue;
      entries[static_cast<size_t>(bh * groups + first + own)] = {tile.begin, tile.end};
    }
  }
  return entries;
}

// What decides through which tiles a kernel goes with a group. Without a mask there is no schedule.
struct KernelTiles {
  const cuda::KernelEntry& kernel;
  cuda::TileList list;
  std::vector<Entries> entries;  // FindEntries
};

// The tiles of a group in the order of a kernel: by the schedule's list; without a mask, rising.
inline std::vector<int64_t> TilesOf(const Case& c, const Problem& p, const KernelTiles& own, int64_t bh,
                                    int64_t group) {
  const cuda::KernelEntry& kernel = own.kernel;
  const int64_t b = bh / c.H;
  std::vector<int64_t> tiles;
  if (c.mask == 0) {
    for (int64_t t = 0; t * kernel.keys < c.T; ++t) tiles.push_back(t);
  } else {
    const Entries entries = own.entries[static_cast<size_t>(bh * ((c.S + kGroup - 1) / kGroup) + group)];
    auto begin = static_cast<size_t>(entries.begin), end = static_cast<size_t>(entries.end);
    const auto place = static_cast<int>(group % (kernel.rows / kGroup));
    // Kernels with softcap go through tiles of other groups, too (Sm90Shape::kSkipsTiles).
    if (c.padding == Padding::kNone && kernel.rows > kGroup && c.softcap == 0) {
      while (begin < end && (cuda::LeadingSkips(own.list.code[begin]) >> place & 1) != 0) ++begin;
      while (begin < end && (cuda::TrailingSkips(own.list.code[end - 1]) >> place & 1) != 0) --end;
    }
    for (size_t i = begin; i < end; ++i) tiles.push_back(own.list.key_tile[i]);
  }
  const auto is_padding = [&](int64_t t) {
    const auto from = p.pad.begin() + b * c.T;
    return std::none_of(from + t * kernel.keys, from + std::min(c.T, (t + 1) * kernel.keys),
                        [](uint8_t x) { return x; });
  };
  tiles.erase(std::remove_if(tiles.begin(), tiles.end(), is_padding), tiles.end());
  return tiles;
}

// A group of query rows, in one batch and head.
struct Group {
  int64_t bh, first, rows;
};

// The largest scores of a group in a tile; -inf where a row has none.
struct Tops {
  std::vector<double> top;
  std::vector<bool> is_nan;
  bool has_pair = false;
};

inline Tops FindTops(const Case& c, const Problem& p, const Group& group, int64_t begin, int64_t end) {
  Tops tops;
  for (int64_t r = 0; r < group.rows; ++r) {
    const double* const scores = &p.scores[static_cast<size_t>((group.bh * c.S + group.first + r) * c.T)];
    double top = -kInf;
    bool is_nan = false;
    for (int64_t k = begin; k < end; ++k) top = std::max(top, scores[k]), is_nan = is_nan || std::isnan(scores[k]);
    tops.top.push_back(top), tops.is_nan.push_back(is_nan);
    tops.has_pair = tops.has_pair || is_nan || top > -kInf;
  }
  return tops;
}

// The schedule may leave out only tiles in which the group has no allowed pair.
inline void CheckOthersEmpty(const Case& c, const Problem& p, const Group& group, const std::vector<int64_t>& tiles,
                             int64_t keys) {
  for (int64_t tile = 0; tile * keys < c.T; ++tile) {
    if (std::find(tiles.begin(), tiles.end(), tile) != tiles.end()) continue;
    const bool has_pair = FindTops(c, p, group, tile * keys, std::min(c.T, (tile + 1) * keys)).has_pair;
    CHECK(!has_pair, Describe(c), ": head ", group.bh, " row ", group.first, " misses tile ", tile);
  }
}

// A group on its way through its tiles: which are tested (cuda::UntestedTiles), and with which largest scores.
class Decisions {
 public:
  Decisions(int64_t rows, double distance)
      : distance_(distance), most_(static_cast<size_t>(rows), -kInf), row_max_(most_) {}

  // Whether the next tile is kept.
  bool Keep(const Tops& tops) {
    is_tested_ = tile_ == next_;
    double margin = kInf;  // by how much some row exceeds its threshold
    if (is_tested_) {
      margin = -kInf;
      for (size_t r = 0; r < most_.size(); ++r) {
        const double before = std::max(most_[r], row_max_[r]), own = tops.top[r];
        if (tops.is_nan[r] || (before == -kInf && own > -kInf)) margin = kInf;
        if (own > -kInf && before > -kInf) margin = std::max(margin, own - (before - distance_));
      }
    }
    const bool kept = margin >= 0;
    is_open_ = is_open_ || std::abs(margin) < kNear;
    for (size_t r = 0; r < most_.size() && kept; ++r) {
      // Scores of tiles that are not tested count once they have raised the row max, which lags behind.
      const double above = tops.top[r] - row_max_[r];
      if (!is_tested_ && tile_ > 0 && std::abs(above - kLag) < kNear) is_open_ = true;
      if (tops.top[r] > -kInf && (tile_ == 0 || above > kLag)) row_max_[r] = tops.top[r];
      if (is_tested_ && !tops.is_nan[r]) most_[r] = std::max(most_[r], tops.top[r]);
    }
    ++tile_;
    if (is_tested_) {
      kept_tests_ = kept ? kept_tests_ + 1 : 0;
      next_ = tile_ + cuda::UntestedTiles(kept_tests_);
    }
    return kept;
  }
  bool is_tested() const { return is_tested_; }
  // Whether rounding has decided, here or before: later tiles may then be tested or not.
  bool is_open() const { return is_open_; }

 private:
  const double distance_;
  std::vector<double> most_, row_max_;
  int64_t tile_ = 0, next_ = 1;  // the first tile is kept without a test
  int kept_tests_ = 0;
  bool is_tested_ = false, is_open_ = false;
};

// Sums of a row that is not normalized yet, of its kept tiles.
inline void AddTile(const Case& c, const Problem& p, const Group& group, int64_t begin, int64_t end, bool kept,
                    bool is_open, std::vector<double>* sum, Answer* answer) {
  const int64_t g = group.bh / c.H * c.G + group.bh % c.H / (c.H / c.G);
  for (int64_t r = 0; r < group.rows; ++r) {
    const auto row = static_cast<size_t>(group.bh * c.S + group.first + r);
    const double* const scores = &p.scores[row * static_cast<size_t>(c.T)];
    double* const out = &answer->output[row * static_cast<size_t>(c.D)];
    for (int64_t k = begin; k < end; ++k) {
      if (scores[k] == -kInf) continue;
      const double weight = std::exp(scores[k]);  // scores are small
      if (is_open) answer->open[row] += weight;
      if (!kept) continue;
      (*sum)[static_cast<size_t>(r)] += weight;
      const double* const value = &p.value[static_cast<size_t>((g * c.T + k) * c.D)];
      for (int64_t d = 0; d < c.D; ++d) out[d] += weight * value[d];
    }
  }
}

inline void Normalize(const Case& c, const Problem& p, const Group& group, const std::vector<double>& sum,
                      Answer* answer) {
  for (int64_t r = 0; r < group.rows; ++r) {
    const auto row = static_cast<size_t>(group.bh * c.S + group.first + r);
    const double own = sum[static_cast<size_t>(r)];
    const double sink = c.sink ? std::exp(p.sink[static_cast<size_t>(group.bh % c.H)]) : 0, total = own + sink;
    answer->lse[row] = std::log(total);
    if (own == 0) continue;
    double* const out = &answer->output[row * static_cast<size_t>(c.D)];
    for (int64_t d = 0; d < c.D; ++d) out[d] /= total;
    answer->open[row] /= own;
  }
}

// The definition, tile by tile. A group counts the tiles in which it has an allowed pair, or has not looked.
inline Answer Define(const Case& c, const Problem& p, const KernelTiles& own) {
  const cuda::KernelEntry& kernel = own.kernel;
  Answer answer;
  answer.output.assign(static_cast<size_t>(c.B * c.H * c.S * c.D), 0);
  answer.lse.assign(static_cast<size_t>(c.B * c.H * c.S), -kInf);
  answer.open.assign(answer.lse.size(), 0);
  for (int64_t bh = 0; bh < c.B * c.H; ++bh) {
    for (int64_t first = 0; first < c.S; first += kGroup) {
      const Group group{bh, first, std::min(kGroup, c.S - first)};
      Decisions decisions(group.rows, c.distance);
      std::vector<double> sum(static_cast<size_t>(group.rows), 0);
      const std::vector<int64_t> tiles = TilesOf(c, p, own, bh, first / kGroup);
      CheckOthersEmpty(c, p, group, tiles, kernel.keys);
      for (const int64_t tile : tiles) {
        const int64_t begin = tile * kernel.keys, end = std::min(c.T, begin + kernel.keys);
        const Tops tops = FindTops(c, p, group, begin, end);
        const bool was_open = decisions.is_open(), kept = decisions.Keep(tops), is_open = decisions.is_open();
        const auto pairs = static_cast<uint64_t>(group.rows * kernel.keys);
        const bool counts = kept || tops.has_pair;
        answer.scored += counts ? pairs : 0;
        answer.skipped += counts && !kept ? pairs : 0;
        answer.may_score += is_open && !tops.has_pair ? pairs : 0;
        answer.may_skip += is_open ? pairs : 0;
        ++answer.tiles, answer.untested += decisions.is_tested() ? 0 : 1, answer.near += is_open && !was_open ? 1 : 0;
        AddTile(c, p, group, begin, end, kept, is_open, &sum, &answer);
      }
      Normalize(c, p, group, sum, &answer);
    }
  }
  return answer;
}

}  // namespace stof::test::skip
#endif  // STOF_TESTS_CPP_SKIP_SCORES_CUDA_SKIP_PROBLEM_H_
