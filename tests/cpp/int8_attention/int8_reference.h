// SPDX-License-Identifier: Apache-2.0
// Attention with 8-bit operands by its definition in double precision (docs/design/attention-8bit.md), and attention
// itself.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/cpp/int8_attention/float8.h"

namespace stof::test::int8 {

constexpr double kLog2E = 1.4426950408889634, kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kTile = 128, kMeanKeys = 1024;

struct Dense {
  int64_t B = 1, H = 1, G = 1, S = 1, T = 1, D = 64;
  double scale = 1;
  std::vector<double> query, key, value;  // [B, H or G, S or T, D]
  std::vector<uint8_t> allowed, exists;   // [B, H, S, T]: by mask and padding; [B, T]: not padding
  std::vector<double> sink;               // [H], or none
  std::vector<int64_t> keys;              // [B]: of each sequence, T at most; later rows hold none
  const double* Row(const std::vector<double>& of, int64_t head, int64_t rows, int64_t row) const {
    return &of[static_cast<size_t>((head * rows + row) * D)];
  }
  int64_t KvHead(int64_t bh) const { return bh / H * G + bh % H / (H / G); }
};

struct Result {
  std::vector<double> output, lse;  // [B, H, S, D], [B, H, S]
};

inline double Dot(const double* a, const double* b, int64_t size) {
  double sum = 0;
  for (int64_t d = 0; d < size; ++d) sum += a[d] * b[d];
  return sum;
}

// Attention. Fully masked rows are zeros.
inline Result Attend(const Dense& p) {
  Result result;
  for (int64_t row = 0; row < p.B * p.H * p.S; ++row) {
    const int64_t bh = row / p.S, bg = p.KvHead(bh);
    const double* const query = p.Row(p.query, bh, p.S, row % p.S);
    std::vector<double> scores, o(static_cast<size_t>(p.D));
    double most = -kInfinity, sum = 0;
    for (int64_t k = 0; k < p.T; ++k) {
      const bool allowed = p.allowed[static_cast<size_t>(row * p.T + k)] != 0;
      scores.push_back(allowed ? p.scale * Dot(query, p.Row(p.key, bg, p.T, k), p.D) : -kInfinity);
      most = std::max(most, scores.back());
    }
    for (int64_t k = 0; k < p.T; ++k) {
      const double weight = std::exp(scores[static_cast<size_t>(k)] - most);
      if (!(weight > 0)) continue;
      sum += weight;
      for (int64_t d = 0; d < p.D; ++d) o[static_cast<size_t>(d)] += weight * p.Row(p.value, bg, p.T, k)[d];
    }
    const bool empty = !(sum > 0);
    if (!empty && !p.sink.empty()) sum += std::exp(p.sink[static_cast<size_t>(bh % p.H)] - most);
    for (const double x : o) result.output.push_back(empty ? 0.0 : x / sum);
    result.lse.push_back(most + std::log(sum));
  }
  return result;
}

// Scales are fp32, as what they multiply: 16-bit inputs often lie in the middle between two codes, where rounding is to
// even.
inline float ScaleOf(double largest, float most) { return std::max(static_cast<float>(largest) / most, 0x1p-60f); }
inline float InUnits(double x, float scale) { return static_cast<float>(x) * (1.0f / scale); }

// What is quantized: keys less their mean in int8, and their scales; values in e4m3, and theirs.
struct Quantized {
  std::vector<double> mean, key, key_scale, value;  // [B, G, D], [B, G, T, D], [B, G, T], [B, G, T, D]
};
inline Quantized Quantize(const Dense& p, bool fp8) {
  Quantized q;
  const auto count = static_cast<size_t>(p.B * p.G * p.T);
  q.key.assign(count * static_cast<size_t>(p.D), 0.0), q.value = q.key, q.key_scale.assign(count, 0.0);
  for (int64_t bg = 0; bg < p.B * p.G; ++bg) {
    const auto exists = [&](int64_t k) { return p.exists[static_cast<size_t>(bg / p.G * p.T + k)] != 0; };
    std::vector<double> mean(static_cast<size_t>(p.D));
    double keys = 0;
    const int64_t all = p.keys[static_cast<size_t>(bg / p.G)];
    const int64_t summed = std::min(all, kMeanKeys);  // spread over all keys
    for (int64_t i = 0; i < summed; ++i) {
      const int64_t k = i * all / summed;
      if (!exists(k)) continue;
      ++keys;
      for (int64_t d = 0; d < p.D; ++d) mean[static_cast<size_t>(d)] += p.Row(p.key, bg, p.T, k)[d];
    }
    for (double& x : mean) x = keys > 0 ? x / keys : 0;
    for (int64_t first = 0; first < p.T; first += kTile) {
      const int64_t end = std::min(p.T, first + kTile);
      double largest[8] = {}, largest_value = 0;  // of two keys of the first eight, or of two in each other eight
      const auto group = [first](int64_t k) { return (k - first < 8 ? 0 : 4) + (k - first) % 8 / 2; };
      for (int64_t k = first; k < end; ++k) {
        if (!exists(k)) continue;
        for (int64_t d = 0; d < p.D; ++d) {
          double& most = largest[group(k)];
          most = std::max(most, std::fabs(p.Row(p.key, bg, p.T, k)[d] - mean[static_cast<size_t>(d)]));
          largest_value = std::max(largest_value, std::fabs(p.Row(p.value, bg, p.T, k)[d]));
        }
      }
      for (int64_t k = first; k < end; ++k) {
        const float scale = ScaleOf(largest[group(k)], 127), value_scale = ScaleOf(largest_value, 448);
        q.key_scale[static_cast<size_t>(bg * p.T + k)] = scale;
        for (int64_t d = 0; d < p.D && exists(k); ++d) {
          const auto at = static_cast<size_t>((bg * p.T + k) * p.D + d);
          q.key[at] = std::nearbyint(InUnits(p.key[at] - mean[static_cast<size_t>(d)], scale));
          q.value[at] = fp8 ? RoundToFloat8(InUnits(p.value[at], value_scale)) * value_scale : p.value[at];
        }
      }
    }
    q.mean.insert(q.mean.end(), mean.begin(), mean.end());
  }
  return q;
}

// Attention with quantized operands. orders[row]: the KV tiles of a query of [B, H, S] in the kernel's order. round:
// weights to the type of the products.
template <typename Round>
Result AttendQuantized(const Dense& p, bool fp8, const std::vector<std::vector<int32_t>>& orders, const Round& round) {
  const double headroom = fp8 ? 7 : 0, slack = fp8 ? 8.75 : 14;
  const Quantized q = Quantize(p, fp8);
  Result result;
  for (int64_t row = 0; row < p.B * p.H * p.S; ++row) {
    const int64_t bh = row / p.S, bg = p.KvHead(bh);
    const double* const query = p.Row(p.query, bh, p.S, row % p.S);
    double largest = 0;
    for (int64_t d = 0; d < p.D; ++d) largest = std::max(largest, std::fabs(query[d]));
    const float query_scale = ScaleOf(largest, 127);
    const double log_scale = p.scale * kLog2E;
    std::vector<double> rounded, o(static_cast<size_t>(p.D));
    for (int64_t d = 0; d < p.D; ++d) rounded.push_back(std::nearbyint(InUnits(query[d], query_scale)));
    const auto score = [&](int64_t k) {
      if (p.allowed[static_cast<size_t>(row * p.T + k)] == 0) return -kInfinity;
      return Dot(rounded.data(), p.Row(q.key, bg, p.T, k), p.D) * query_scale * log_scale *
             q.key_scale[static_cast<size_t>(bg * p.T + k)];
    };
    double base = -kInfinity, sum = 0;
    for (const int32_t tile : orders[static_cast<size_t>(row)]) {
      const int64_t first = tile * kTile, end = std::min(p.T, first + kTile);
      std::vector<double> scores;
      for (int64_t k = first; k < end; ++k) scores.push_back(score(k));
      const double top = *std::max_element(scores.begin(), scores.end());
      if (top == -kInfinity) continue;
      if (base == -kInfinity || top - base > slack) {
        const double factor = base == -kInfinity ? 0 : std::exp2(base - (top - headroom));
        for (double& x : o) x *= factor;
        sum *= factor, base = top - headroom;
      }
      for (int64_t k = first; k < end; ++k) {
        const double weight = std::exp2(scores[static_cast<size_t>(k - first)] - base);
        sum += weight;
        for (int64_t d = 0; d < p.D; ++d) o[static_cast<size_t>(d)] += round(weight) * p.Row(q.value, bg, p.T, k)[d];
      }
    }
    const bool empty = !(sum > 0);
    const double shift = Dot(query, &q.mean[static_cast<size_t>(bg * p.D)], p.D) * log_scale;
    if (!empty && !p.sink.empty()) sum += std::exp2(p.sink[static_cast<size_t>(bh % p.H)] * kLog2E - base - shift);
    for (const double x : o) result.output.push_back(empty ? 0.0 : x / sum);
    result.lse.push_back(empty ? -kInfinity : (base + shift + std::log2(sum)) / kLog2E);
  }
  return result;
}

// Root of the mean square of a difference, relative to that of the second.
inline double RelativeRms(const std::vector<double>& found, const std::vector<double>& wanted) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    difference += (found[i] - wanted[i]) * (found[i] - wanted[i]), size += wanted[i] * wanted[i];
  }
  return std::sqrt(difference / size);
}

}  // namespace stof::test::int8
