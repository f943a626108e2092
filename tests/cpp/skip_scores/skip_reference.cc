// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/skip_scores/skip_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "cpu/attention/plan.h"

namespace stof::test::attention {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// A query of a head.
struct QueryRow {
  int64_t h, i;
};

class Chooser {
 public:
  Chooser(const Dense& problem, const AttentionArgs& args, const CpuAttentionConfig& config)
      : p_(problem), args_(args), config_(config), pairs_(Scores(problem)) {
    choice_.kept = problem.allowed;
    choice_.is_uncertain.resize(static_cast<size_t>(problem.B * problem.H * problem.S));
  }

  // A work item: rows from row0 on, in strips of so many, and key tiles [first, last).
  void Visit(int64_t b, const std::vector<QueryRow>& rows, int64_t row0, int64_t strip, int64_t first, int64_t last) {
    keys_ = args_.kv.key_ends == nullptr ? p_.T : args_.kv.key_ends[b];
    const double threshold = static_cast<double>(args_.scores.skip_threshold), keys = static_cast<double>(keys_);
    distance_ = keys > threshold ? std::log(keys / threshold) : 0.0;
    int64_t last_query = row0;
    for (const QueryRow& row : rows) last_query = std::max(last_query, row.i);
    const std::vector<int64_t> tiles = Order(b, rows[0].h, row0, last_query, first, last);
    for (size_t at = 0; at < rows.size(); at += static_cast<size_t>(strip)) {
      const size_t end = std::min(rows.size(), at + static_cast<size_t>(strip));
      VisitStrip(b, {rows.begin() + static_cast<std::ptrdiff_t>(at), rows.begin() + static_cast<std::ptrdiff_t>(end)},
                 tiles);
    }
  }
  SkipChoice Take() { return std::move(choice_); }

 private:
  // The tiles at the positions of the rows, then those before and behind: in each range partial ones of a block mask
  // first.
  std::vector<int64_t> Order(int64_t b, int64_t h, int64_t row0, int64_t last_query, int64_t first, int64_t last) {
    const int64_t n = config_.n, past = keys_ - p_.S;
    last = std::min(last, (keys_ + n - 1) / n);
    const auto tile_of = [&](int64_t position) { return position < 0 ? -1 : position / n; };
    const int64_t own_first = std::clamp(std::max<int64_t>(0, tile_of(past + row0)), first, std::max(first, last));
    const int64_t own_last = std::clamp(tile_of(past + last_query) + 1, own_first, std::max(own_first, last));
    std::vector<int64_t> tiles;
    const auto append = [&](int64_t begin, int64_t end) {
      const BlockMask* const blocks = args_.mask.fixed.blocks();
      if (blocks == nullptr) {
        for (int64_t tile = begin; tile < end; ++tile) tiles.push_back(tile);
        return;
      }
      const auto row = static_cast<size_t>(int64_t{blocks->TableOf(b, h)} * blocks->rows + row0 / config_.m);
      for (int32_t at = blocks->row_ptr[row]; at < blocks->row_ptr[row + 1]; ++at) {
        const int64_t tile = blocks->key_tile[static_cast<size_t>(at)];
        if (tile >= begin && tile < end) tiles.push_back(tile);
      }
    };
    append(own_first, own_last);
    append(first, own_first);
    append(own_last, last);
    return tiles;
  }

  void VisitStrip(int64_t b, const std::vector<QueryRow>& rows, const std::vector<int64_t>& tiles) {
    std::vector<double> top(rows.size(), -kInf);
    bool has_nan = false;
    for (const int64_t tile : tiles) {
      const int64_t begin = tile * config_.n, end = std::min(keys_, begin + config_.n);
      bool is_active = false, has_own_nan = false;
      double margin = -kInf, error = 0;  // of the row that lies highest above its bound; a row keeps the tile from 0 on
      std::vector<double> high(rows.size(), -kInf);
      for (size_t r = 0; r < rows.size(); ++r) {
        for (int64_t k = begin; k < end; ++k) {
          const size_t at = PairOf(b, rows[r], k);
          is_active = is_active || p_.allowed[at] != 0;
          has_own_nan = has_own_nan || std::isnan(pairs_.scores[at]);
          if (pairs_.scores[at] > high[r]) high[r] = pairs_.scores[at];
          error = std::max(error, std::ldexp(64 + 8 * pairs_.sizes[at], -24));
        }
        if (high[r] == -kInf) continue;
        // Nothing is far from the lowest number of a type: it absorbs the distance, and keeps the tile.
        const bool absorbs = std::abs(top[r]) > 1e30 && std::abs(high[r]) > 1e30;
        margin = std::max(margin, std::isfinite(top[r]) && !absorbs ? high[r] - (top[r] - distance_) : kInf);
        if (std::abs(top[r]) < 1e30) error = std::max(error, std::ldexp(64 + 8 * std::abs(top[r]), -24));
      }
      if (!is_active) continue;
      const auto pairs = static_cast<uint64_t>(static_cast<int64_t>(rows.size()) * (end - begin));
      choice_.scored += pairs;
      // Scores that are exact in fp32 may equal the largest one: they keep the tile.
      if (p_.exact_beyond > 0 && p_.softcap == 0 && distance_ == 0) error = 0;
      const bool is_uncertain = has_nan || (!has_own_nan && (error > 0 || margin != 0) && std::abs(margin) <= error);
      if (is_uncertain) {
        choice_.uncertain += pairs;
        for (const QueryRow& row : rows) choice_.is_uncertain[RowOf(b, row)] = 1;
      } else if (margin < 0 && !has_own_nan) {
        choice_.skipped += pairs;
        for (const QueryRow& row : rows) {
          for (int64_t k = begin; k < end; ++k) choice_.kept[PairOf(b, row, k)] = 0;
        }
        continue;
      }
      has_nan = has_nan || has_own_nan;
      for (size_t r = 0; r < rows.size(); ++r) top[r] = std::max(top[r], high[r]);
    }
  }

  size_t RowOf(int64_t b, const QueryRow& row) const { return static_cast<size_t>((b * p_.H + row.h) * p_.S + row.i); }
  size_t PairOf(int64_t b, const QueryRow& row, int64_t k) const {
    return RowOf(b, row) * static_cast<size_t>(p_.T) + static_cast<size_t>(k);
  }

  const Dense& p_;
  const AttentionArgs& args_;
  const CpuAttentionConfig& config_;
  const PairScores pairs_;
  SkipChoice choice_;
  int64_t keys_ = 0;
  double distance_ = 0;
};

}  // namespace

SkipChoice ChooseTiles(const Dense& problem, const AttentionArgs& args, const CpuAttentionConfig& config, int threads) {
  cpu::AttentionPlan plan(args, config, threads, false);
  const cpu::AttentionProblem& split = *plan.problem();
  Chooser chooser(problem, args, config);
  std::vector<QueryRow> rows;
  for (int64_t b = 0; b < problem.B; ++b) {
    for (int64_t h = 0; !split.few_queries && h < problem.H; ++h) {
      for (int64_t row0 = 0; row0 < problem.S; row0 += config.m) {
        rows.clear();
        for (int64_t i = row0; i < std::min(problem.S, row0 + config.m); ++i) rows.push_back({h, i});
        chooser.Visit(b, rows, row0, cpu::kStrip, 0, split.key_tiles);
      }
    }
    // GQA packing: the queries of several heads of a group, for the tiles of each KV split.
    for (int64_t h = 0; split.few_queries && h < problem.H; h += split.packed_heads) {
      rows.clear();
      for (int64_t head = h; head < h + split.packed_heads; ++head) {
        for (int64_t i = 0; i < problem.S; ++i) rows.push_back({head, i});
      }
      const cpu::KvSplits& splits = split.kv_splits[b * problem.G + h / (problem.H / problem.G)];
      for (int64_t s = 0; s < splits.count; ++s) {
        chooser.Visit(b, rows, 0, split.in_place ? cpu::kInPlaceStrip : cpu::kStrip, splits.begin[s],
                      splits.begin[s + 1]);
      }
    }
  }
  return chooser.Take();
}

}  // namespace stof::test::attention
