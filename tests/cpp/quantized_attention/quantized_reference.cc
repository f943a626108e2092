// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/quantized_attention/quantized_reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace stof::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int64_t CodeOf(const TensorView& view, const Quantization& q, int64_t b, int64_t head, int64_t row, int64_t d) {
  const int64_t at = b * view.stride.b + head * view.stride.h + row * view.stride.s + d;
  return (q.is_signed ? int64_t{static_cast<const int8_t*>(view.data)[at]}
                      : int64_t{static_cast<const uint8_t*>(view.data)[at]}) -
         q.zero_point;
}

// The code of a number of steps, without its zero point.
double Round(double steps, const Quantization& q) {
  const double low = (q.is_signed ? -128 : 0) - q.zero_point;
  return std::clamp(std::nearbyint(steps), low, low + 255.0);
}

float FakeRound(float x, const Quantization& q) {
  if (q.scale == 0.0f || std::isnan(x)) return x;
  return static_cast<float>(Round(static_cast<double>(x / q.scale), q)) * q.scale;
}

double ScoreOf(const QuantizedAttentionArgs& args, int64_t product, float bias) {
  const float unit = args.query.scale * args.key.scale, scale = args.attention.scores.scale;
  float x = 0.0f;
  if (args.score.scale != 0.0f) {
    const auto steps = static_cast<double>(static_cast<float>(product) * (unit / args.score.scale));
    x = static_cast<float>(Round(steps, args.score)) * args.score.scale;
  } else {
    x = static_cast<float>(product) * unit;
  }
  x = FakeRound(x * scale, args.scaled_score);
  return static_cast<double>(FakeRound(x + bias, args.biased_score));
}

// One row of a query head.
struct Row {
  int64_t b, h, g, i;
  std::vector<double> weights = {};
  double largest_score = 0.0;  // its magnitude
  bool is_empty = false, is_nan = false;
};

class Reference {
 public:
  Reference(const QuantizedAttentionArgs& args, const IsAllowed& is_allowed) : args_(args), is_allowed_(is_allowed) {}

  QuantizedReference Run() {
    const AttentionShape& s = args_.attention.shape;
    std::vector<Row> rows;
    double largest = 0.0;
    for (int64_t b = 0; b < s.B; ++b) {
      for (int64_t h = 0; h < s.H; ++h) {
        for (int64_t i = 0; i < s.S; ++i) {
          rows.push_back({b, h, h / (s.H / s.G), i});
          Weigh(&rows.back());
          for (const double weight : rows.back().weights) largest = std::max(largest, weight);
        }
      }
    }
    weight_ = args_.weight;
    if (args_.has_dynamic_weights) {
      weight_ = Quantization{largest > 0.0 ? static_cast<float>(largest) / 255.0f : 1.0f, 0, false};
    }
    QuantizedReference found;
    for (const Row& row : rows) Multiply(row, &found);
    return found;
  }

 private:
  double Score(const Row& row, int64_t k) const {
    const AttentionArgs& a = args_.attention;
    int64_t product = 0;
    for (int64_t d = 0; d < a.shape.D; ++d) {
      product += CodeOf(a.query, args_.query, row.b, row.h, row.i, d) * CodeOf(a.key, args_.key, row.b, row.g, k, d);
    }
    const PairBias& bias = a.scores.bias;
    const int64_t at = row.b * bias.stride_b + row.h * bias.stride_h + row.i * bias.stride_q + k * bias.stride_k;
    return ScoreOf(args_, product, bias.data == nullptr ? 0.0f : static_cast<const float*>(bias.data)[at]);
  }

  bool Softmax(bool attends_all, Row* row) const {
    const int64_t T = args_.attention.shape.T;
    std::vector<double> scores(static_cast<size_t>(T), -kInfinity);
    for (int64_t k = 0; k < T; ++k) {
      if (attends_all || is_allowed_(row->b, row->h, row->i, k)) scores[static_cast<size_t>(k)] = Score(*row, k);
    }
    double most = -kInfinity, sum = 0.0;
    for (const double x : scores) {
      row->is_nan = row->is_nan || std::isnan(x);
      most = std::max(most, x);
    }
    row->weights.assign(static_cast<size_t>(T), 0.0);
    if (row->is_nan) return true;
    if (most == -kInfinity) return false;
    row->largest_score = std::fabs(most);
    for (size_t k = 0; k < scores.size(); ++k) sum += row->weights[k] = std::exp(scores[k] - most);
    for (double& weight : row->weights) weight /= sum;
    return true;
  }

  void Weigh(Row* row) const {
    const int64_t T = args_.attention.shape.T;
    if (Softmax(false, row)) return;
    const EmptyRows policy = T == 0 ? EmptyRows::kZero : args_.attention.mask.empty_rows;
    if (policy == EmptyRows::kMean) row->weights.assign(static_cast<size_t>(T), 1.0 / static_cast<double>(T));
    // With all keys a score may be NaN, or all of them -inf.
    const bool has_none = policy == EmptyRows::kAll && !Softmax(true, row);
    row->is_nan = row->is_nan || has_none || policy == EmptyRows::kNan;
  }

  void Multiply(const Row& row, QuantizedReference* found) const {
    const AttentionArgs& a = args_.attention;
    const auto scale = static_cast<double>(weight_.scale), unit = scale * static_cast<double>(args_.value.scale);
    std::vector<double> codes, doubts;
    for (const double weight : row.weights) {
      const double steps = weight / scale, code = Round(steps, weight_);
      // fp32 exponentials and sums are off by a few units of the last place.
      const double slack = (4e-6 + 3e-7 * row.largest_score) * std::fabs(steps) + 1e-9;
      const double doubt =
          std::max(std::fabs(Round(steps + slack, weight_) - code), std::fabs(Round(steps - slack, weight_) - code));
      found->ties += doubt > 0.0 ? 1 : 0;
      ++found->weights;
      codes.push_back(code);
      doubts.push_back(doubt);
    }
    for (int64_t d = 0; d < a.shape.Dv; ++d) {
      double sum = 0.0, doubt = 0.0, size = 0.0;
      for (int64_t k = 0; k < a.shape.T; ++k) {
        const auto value = static_cast<double>(CodeOf(a.value, args_.value, row.b, row.g, k, d));
        sum += codes[static_cast<size_t>(k)] * value;
        size += std::fabs(codes[static_cast<size_t>(k)] * value);
        doubt += doubts[static_cast<size_t>(k)] * std::fabs(value);
      }
      found->output.push_back(row.is_nan ? std::numeric_limits<double>::quiet_NaN() : sum * unit);
      found->tolerance.push_back((doubt + 1e-6 * size + 1e-6 * std::fabs(sum)) * unit);
    }
  }

  const QuantizedAttentionArgs& args_;
  const IsAllowed& is_allowed_;
  Quantization weight_;
};

}  // namespace

QuantizedReference ComputeQuantizedAttention(const QuantizedAttentionArgs& args, const IsAllowed& is_allowed) {
  return Reference(args, is_allowed).Run();
}

}  // namespace stof::test
