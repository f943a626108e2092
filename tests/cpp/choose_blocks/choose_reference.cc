// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/choose_blocks/choose_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "plugins/core/contract/chosen_blocks.h"

namespace stof::test::attention {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kUnit = 0x1p-24;  // the unit roundoff of fp32
constexpr int64_t kBlock = 128;

// A mean of rows, and how far that of a kernel may be from it, by element.
struct PooledRow {
  bool exists = false;
  std::vector<double> mean, error;
};

// An estimate lies between low and high.
struct Estimate {
  bool exists = false, is_nan = false;
  double low = -kInf, high = -kInf;
};

bool IsFloat32(double x) { return static_cast<double>(static_cast<float>(x)) == x; }

PooledRow MeanOf(const std::vector<const double*>& rows, int64_t size, DType dtype) {
  PooledRow pooled;
  pooled.exists = !rows.empty();
  const auto count = static_cast<double>(rows.size());
  for (int64_t d = 0; d < size && pooled.exists; ++d) {
    double sum = 0, magnitude = 0;
    bool is_exact = true;  // fp32 holds all sums
    for (const double* const row : rows) {
      sum += row[d], magnitude += std::abs(row[d]);
      is_exact = is_exact && IsFloat32(sum);
    }
    double mean = sum / count, error = (count + 3) * kUnit * magnitude / count;
    if (!std::isfinite(mean) || (is_exact && IsFloat32(mean))) error = 0;
    if (dtype != DType::kF32) {
      // Two numbers of fp32 beside a tie round to neighbours of the type.
      const double low = Rounded(dtype, mean - error), high = Rounded(dtype, mean + error);
      mean = Rounded(dtype, mean);
      error = low == high ? 0 : std::max(mean - low, high - mean);
      if (!std::isfinite(error)) error = 0;
    }
    pooled.mean.push_back(mean), pooled.error.push_back(error);
  }
  return pooled;
}

Estimate EstimateOf(const PooledRow& query, const PooledRow& key, const Dense& p) {
  Estimate result;
  result.exists = query.exists && key.exists;
  if (!result.exists) return result;
  double sum = 0, size = 0, error = 0;
  for (size_t d = 0; d < query.mean.size(); ++d) {
    const double q = query.mean[d], k = key.mean[d], of_q = query.error[d], of_k = key.error[d];
    sum += q * k, size += std::abs(q * k);
    error += std::abs(q) * of_k + (std::abs(k) + of_k) * of_q;
  }
  error = std::abs(p.scale) * (error + 4 * (4 + std::sqrt(static_cast<double>(p.D))) * kUnit * size);
  double value = p.scale * sum;
  if (p.softcap > 0 && !std::isnan(value)) {
    value = p.softcap * std::tanh(value / p.softcap);
    error = std::min(error, 2 * p.softcap) + 8 * kUnit * p.softcap;
  }
  result.is_nan = std::isnan(value);
  if (result.is_nan) return result;
  result.low = std::isfinite(value) ? value - error : value;
  result.high = std::isfinite(value) ? value + error : value;
  return result;
}

enum class State : uint8_t { kNoCandidate, kLeftOut, kUncertain, kChosen };

class Chooser {
 public:
  explicit Chooser(const ChooseProblem& problem) : c_(problem), p_(*problem.dense) {
    sets_.kept = p_.allowed;
    sets_.is_uncertain.resize(static_cast<size_t>(p_.B * p_.H * p_.S));
    key_blocks_ = (p_.T + kBlock - 1) / kBlock;
    for (int64_t b = 0; b < p_.B; ++b) {
      for (int64_t g = 0; g < p_.G; ++g) PoolKeys(b, g);
    }
  }
  void Visit(int64_t b, int64_t h, int64_t query_block) {
    b_ = b, h_ = h;
    row0_ = query_block * kBlock, rows_ = std::min(kBlock, p_.S - row0_);
    FindCandidates(query_block);
    FindEstimates();
    FindMaxEstimates();
    for (int64_t block = 0; block < key_blocks_; ++block) {
      const State state = StateOf(block);
      if (state == State::kNoCandidate) continue;
      Count(block, state);
      for (int64_t row = row0_; row < row0_ + rows_; ++row) {
        if (state == State::kUncertain) sets_.is_uncertain[static_cast<size_t>(RowOf(row))] = 1;
        for (int64_t k = block * kBlock; k < EndOf(block) && state == State::kLeftOut; ++k) {
          sets_.kept[static_cast<size_t>(RowOf(row) * p_.T + k)] = 0;
        }
      }
    }
  }
  BlockSets Take() { return std::move(sets_); }

 private:
  int64_t RowOf(int64_t row) const { return (b_ * p_.H + h_) * p_.S + row; }
  int64_t EndOf(int64_t block) const { return std::min((block + 1) * kBlock, c_.ends[static_cast<size_t>(b_)]); }
  bool IsPadded(int64_t b, int64_t k) const { return c_.pad != nullptr && c_.pad[b * p_.T + k] == 0; }

  void PoolKeys(int64_t b, int64_t g) {
    std::vector<PooledRow> pooled;
    for (int64_t first = 0; first < p_.T; first += kPooledKeys) {
      std::vector<const double*> rows;
      for (int64_t k = first; k < std::min(first + kPooledKeys, c_.ends[static_cast<size_t>(b)]); ++k) {
        if (!IsPadded(b, k)) rows.push_back(&p_.key[static_cast<size_t>(((b * p_.G + g) * p_.T + k) * p_.D)]);
      }
      pooled.push_back(MeanOf(rows, p_.D, c_.dtype));
    }
    pooled_keys_.push_back(std::move(pooled));
  }

  bool HasPair(int64_t row0, int64_t rows, int64_t block) const {
    for (int64_t row = row0; row < row0 + rows; ++row) {
      for (int64_t k = block * kBlock; k < EndOf(block); ++k) {
        if (c_.fixed[static_cast<size_t>(RowOf(row) * p_.T + k)] != 0) return true;
      }
    }
    return false;
  }
  void FindCandidates(int64_t query_block) {
    has_pair_.clear(), is_candidate_.clear();
    for (int64_t block = 0; block < key_blocks_; ++block) {
      const bool has_pair = HasPair(row0_, rows_, block), exists = block * kBlock < EndOf(block);
      has_pair_.push_back(has_pair);
      is_candidate_.push_back(has_pair || (exists && c_.is_listed(b_, h_, query_block, block)));
    }
  }

  // estimates_[pooled query][pooled key], of candidate blocks.
  void FindEstimates() {
    const std::vector<PooledRow>& keys = pooled_keys_[static_cast<size_t>(b_ * p_.G + h_ / (p_.H / p_.G))];
    estimates_.clear();
    for (int64_t first = row0_; first < row0_ + rows_; first += kPooledQueries) {
      std::vector<const double*> rows;
      for (int64_t row = first; row < std::min(first + kPooledQueries, row0_ + rows_); ++row) {
        rows.push_back(&p_.query[static_cast<size_t>(RowOf(row) * p_.D)]);
      }
      const PooledRow query = MeanOf(rows, p_.D, c_.dtype);
      estimates_.emplace_back(keys.size());
      for (size_t j = 0; j < keys.size(); ++j) {
        if (is_candidate_[j * kPooledKeys / kBlock]) estimates_.back()[j] = EstimateOf(query, keys[j], p_);
      }
    }
  }
  void FindMaxEstimates() {
    max_low_.assign(estimates_.size(), -kInf), max_high_ = max_low_;
    for (size_t i = 0; i < estimates_.size(); ++i) {
      for (size_t j = 0; j < estimates_[i].size(); ++j) {
        const Estimate& estimate = estimates_[i][j];
        if (has_pair_[j * kPooledKeys / kBlock]) max_low_[i] = std::max(max_low_[i], estimate.low);
        max_high_[i] = std::max(max_high_[i], estimate.high);
      }
    }
  }

  State StateOf(int64_t block) const {
    if (!is_candidate_[static_cast<size_t>(block)]) return State::kNoCandidate;
    const int64_t diagonal = c_.diagonal[static_cast<size_t>(b_)] + row0_;
    if (block == 0 || (block * kBlock < diagonal + rows_ && (block + 1) * kBlock > diagonal)) return State::kChosen;
    bool is_uncertain = false;
    for (size_t i = 0; i < estimates_.size(); ++i) {
      double others = -kInf;  // the largest estimate of the pooled query in other blocks
      for (size_t j = 0; j < estimates_[i].size(); ++j) {
        if (static_cast<int64_t>(j) * kPooledKeys / kBlock != block) others = std::max(others, estimates_[i][j].high);
      }
      const size_t last = std::min(estimates_[i].size(), static_cast<size_t>((block + 1) * kBlock / kPooledKeys));
      for (auto j = static_cast<size_t>(block * kBlock / kPooledKeys); j < last; ++j) {
        const Estimate& estimate = estimates_[i][j];
        if (!estimate.exists) continue;
        if (estimate.is_nan) return State::kChosen;
        if (estimate.high == -kInf) continue;
        const double distance = std::log(c_.threshold);
        const double sizes = std::abs(estimate.high) + std::abs(distance);
        const double error = std::isfinite(sizes) ? 4 * kUnit * sizes : 0;
        if (estimate.low >= max_high_[i] + distance + error || estimate.low > others) return State::kChosen;
        is_uncertain = is_uncertain || estimate.high >= max_low_[i] + distance - error;
      }
    }
    return is_uncertain ? State::kUncertain : State::kLeftOut;
  }

  // By tiles of m rows: those with a pair, and with a key that is not padded.
  void Count(int64_t block, State state) {
    bool exists = false;
    for (int64_t k = block * kBlock; k < EndOf(block); ++k) exists = exists || !IsPadded(b_, k);
    for (int64_t row0 = row0_; row0 < row0_ + rows_ && exists; row0 += c_.m) {
      const int64_t rows = std::min(c_.m, row0_ + rows_ - row0);
      if (!HasPair(row0, rows, block)) continue;
      const auto pairs = static_cast<uint64_t>(rows * (EndOf(block) - block * kBlock));
      sets_.scored += pairs;
      if (state == State::kLeftOut) sets_.skipped += pairs;
      if (state == State::kUncertain) sets_.uncertain += pairs;
    }
  }

  const ChooseProblem& c_;
  const Dense& p_;
  BlockSets sets_;
  int64_t key_blocks_ = 0, b_ = 0, h_ = 0, row0_ = 0, rows_ = 0;
  std::vector<std::vector<PooledRow>> pooled_keys_;  // [B * G]
  std::vector<bool> has_pair_, is_candidate_;        // of key blocks
  std::vector<std::vector<Estimate>> estimates_;
  std::vector<double> max_low_, max_high_;
};

}  // namespace

BlockSets ChooseKeyBlocks(const ChooseProblem& problem) {
  const Dense& dense = *problem.dense;
  Chooser chooser(problem);
  for (int64_t b = 0; b < dense.B; ++b) {
    for (int64_t h = 0; h < dense.H; ++h) {
      for (int64_t block = 0; block * kBlock < dense.S; ++block) chooser.Visit(b, h, block);
    }
  }
  return chooser.Take();
}

}  // namespace stof::test::attention
