// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/attention/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace stof::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Format {
  int fraction;  // bits
  int bias;
};
Format HalfFormat(DType dtype) { return dtype == DType::kF16 ? Format{10, 15} : Format{7, 127}; }

double DecodeHalf(const Format& format, uint16_t bits) {
  const int most = 2 * format.bias + 1;
  const int exponent = bits >> format.fraction & most;
  const int fraction = bits & ((1 << format.fraction) - 1);
  double value = 0;
  if (exponent == most) {
    value = fraction == 0 ? kInf : std::nan("");
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - format.bias - format.fraction);
  } else {
    value = std::ldexp(fraction + (1 << format.fraction), exponent - format.bias - format.fraction);
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

uint16_t EncodeHalf(const Format& format, double value) {
  const int most = 2 * format.bias + 1;
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  const auto infinity = static_cast<uint16_t>(most << format.fraction);
  if (std::isnan(value)) return static_cast<uint16_t>(infinity | 1 << (format.fraction - 1));
  value = std::abs(value);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  if (value == 0) return sign;
  int exponent = 0;
  std::frexp(value, &exponent);
  exponent = std::max(exponent - 1, 1 - format.bias);  // subnormals share the smallest exponent
  const auto units = static_cast<int64_t>(std::nearbyint(std::ldexp(value, format.fraction - exponent)));
  // A carry out of the fraction raises the exponent, as it should.
  const int64_t bits = units + (static_cast<int64_t>(exponent + format.bias - 1) << format.fraction);
  return static_cast<uint16_t>(sign | std::min<int64_t>(bits, infinity));
}

double Dot(const double* a, const double* b, int64_t count) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int j = 0; j < 4; ++j) sum[j] += a[i + j] * b[i + j];
  }
  for (; i < count; ++i) sum[0] += a[i] * b[i];
  return sum[0] + sum[1] + (sum[2] + sum[3]);
}

double RoundToFloat(double value) {
  if (std::abs(value) >= 0x1.ffffffp127) return std::copysign(kInf, value);  // half a unit above the largest number
  return static_cast<double>(static_cast<float>(value));
}

std::vector<double> Norms(const std::vector<double>& rows, int64_t size) {
  std::vector<double> norms;
  for (size_t i = 0; i < rows.size(); i += static_cast<size_t>(size)) {
    norms.push_back(std::sqrt(Dot(&rows[i], &rows[i], size)));
  }
  return norms;
}

class RowWriter {
 public:
  explicit RowWriter(const Dense& problem)
      : p_(problem),
        query_norms_(Norms(p_.query, p_.D)),
        key_norms_(Norms(p_.key, p_.D)),
        scores_(static_cast<size_t>(p_.T)),
        sizes_(static_cast<size_t>(p_.T)) {}

  void Write(int64_t b, int64_t h, int64_t i, double* output, double* magnitude, double* lse) {
    Begin(b, h, i);
    std::fill(output, output + p_.Dv, 0.0);
    *magnitude = 0;
    bool any = Score(true);
    *lse = sink_;
    if (any) {
      *lse = Average(output, magnitude);
    } else {
      if (p_.empty_rows == EmptyRows::kZero || p_.T == 0) return;
      if (p_.empty_rows == EmptyRows::kNan) {
        std::fill(output, output + p_.Dv, std::nan(""));
        return;
      }
      if (p_.empty_rows == EmptyRows::kMean) {
        std::fill(scores_.begin(), scores_.end(), 0.0);
        std::fill(sizes_.begin(), sizes_.end(), 0.0);
      } else if (!Score(false)) {  // biases of -inf throughout
        std::fill(output, output + p_.Dv, std::nan(""));
        return;
      }
      Average(output, magnitude);
    }
  }

  void AppendScores(int64_t b, int64_t h, int64_t i, PairScores* all) {
    Begin(b, h, i);
    Score(true);
    all->scores.insert(all->scores.end(), scores_.begin(), scores_.end());
    all->sizes.insert(all->sizes.end(), sizes_.begin(), sizes_.end());
  }

 private:
  void Begin(int64_t b, int64_t h, int64_t i) {
    row_ = (b * p_.H + h) * p_.S + i;
    keys_ = (b * p_.G + h / (p_.H / p_.G)) * p_.T;
    sink_ = p_.sink.empty() ? -kInf : p_.sink[static_cast<size_t>(h)];
  }

  // False: every score is -inf, since no key is allowed or the allowed ones have such scores. Forbidden keys are not
  // even read. Not `masked`: biases alone forbid.
  bool Score(bool masked) {
    bool any = false;
    for (int64_t j = 0; j < p_.T; ++j) {
      const auto at = static_cast<size_t>(row_ * p_.T + j);
      const double bias = p_.bias.empty() ? 0.0 : p_.bias[at];
      double& score = scores_[static_cast<size_t>(j)];
      if ((masked && p_.allowed[at] == 0) || bias == -kInf) {
        score = -kInf;
        sizes_[static_cast<size_t>(j)] = 0;
        continue;
      }
      score = Dot(&p_.query[static_cast<size_t>(row_ * p_.D)], &p_.key[static_cast<size_t>((keys_ + j) * p_.D)], p_.D);
      double size = query_norms_[static_cast<size_t>(row_)] * key_norms_[static_cast<size_t>(keys_ + j)];
      AddTerms(j, &score, &size);
      score *= p_.scale;
      size = std::abs(p_.scale) * size + std::sqrt(static_cast<double>(p_.D)) / 2 * std::abs(score);
      if (p_.softcap > 0) {
        score = p_.softcap * std::tanh(score / p_.softcap);
        size = std::min(size, 2 * p_.softcap) + p_.softcap;
      }
      score += bias;
      // The lowest number of fp32 and bf16 absorbs the score, in double precision as in fp32.
      if (std::abs(bias) < 1e30) size += std::abs(bias);
      if (p_.exact_beyond > 0) {
        score = RoundToFloat(score);
        size = std::abs(score) <= p_.exact_beyond ? std::abs(score) : 0;
      }
      sizes_[static_cast<size_t>(j)] = size;
      any = any || score != -kInf;
    }
    return any;
  }

  // Adds the products with relative tables to the score of key j, and how large they may be to its size.
  void AddTerms(int64_t j, double* score, double* size) const {
    const auto add = [&](const DenseTable& table, const std::vector<double>& rows, int64_t row, double norm) {
      if (table.values.empty()) return;
      const double* const at = table.At(row_ / p_.S % p_.H, row_ % p_.S * p_.T + j);
      *score += Dot(&rows[static_cast<size_t>(row * p_.D)], at, p_.D);
      *size += norm * std::sqrt(Dot(at, at, p_.D));
      if (table.columns == p_.D) return;
      *score += at[p_.D];
      *size += std::abs(at[p_.D]);
    };
    const double query = query_norms_[static_cast<size_t>(row_)];
    for (const DenseTable& table : p_.relative_key) add(table, p_.query, row_, query);
    add(p_.relative_query, p_.key, keys_ + j, key_norms_[static_cast<size_t>(keys_ + j)]);
  }

  // Returns the LSE.
  double Average(double* output, double* magnitude) {
    double top = sink_;
    for (const double score : scores_) top = score > top ? score : top;
    double sum = sink_ == -kInf ? 0 : std::exp(sink_ - top);
    *magnitude = sum * (sink_ == -kInf ? 0 : std::abs(sink_));
    for (int64_t j = 0; j < p_.T; ++j) {
      const double score = scores_[static_cast<size_t>(j)];
      if (score == -kInf) continue;
      const double weight = std::exp(score - top);
      sum += weight;
      *magnitude += weight * sizes_[static_cast<size_t>(j)];
      const double* value = &p_.value[static_cast<size_t>((keys_ + j) * p_.Dv)];
      for (int64_t d = 0; d < p_.Dv; ++d) output[d] += weight * value[d];
      if (p_.relative_value.values.empty()) continue;
      const double* const relative = p_.relative_value.At(row_ / p_.S % p_.H, row_ % p_.S * p_.T + j);
      for (int64_t d = 0; d < p_.Dv; ++d) output[d] += weight * relative[d];
    }
    for (int64_t d = 0; d < p_.Dv; ++d) output[d] /= sum;
    *magnitude /= sum;
    return top + std::log(sum);
  }

  const Dense& p_;
  const std::vector<double> query_norms_, key_norms_;
  std::vector<double> scores_, sizes_;
  int64_t row_ = 0, keys_ = 0;
  double sink_ = -kInf;
};

}  // namespace

int64_t SizeOfFloat(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

double LoadFloat(DType dtype, const void* source) {
  if (dtype == DType::kF32) {
    float value = 0;
    std::memcpy(&value, source, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, source, 2);
  return DecodeHalf(HalfFormat(dtype), bits);
}

void StoreFloat(DType dtype, double value, void* target) {
  if (dtype == DType::kF32) {
    const auto narrow = static_cast<float>(value);
    std::memcpy(target, &narrow, 4);
    return;
  }
  const uint16_t bits = EncodeHalf(HalfFormat(dtype), value);
  std::memcpy(target, &bits, 2);
}

double Rounded(DType dtype, double value) {
  char bytes[4];
  StoreFloat(dtype, value, bytes);
  return LoadFloat(dtype, bytes);
}

Answer Attend(const Dense& problem) {
  Answer answer;
  answer.output.resize(static_cast<size_t>(problem.B * problem.H * problem.S * problem.Dv));
  answer.magnitude.resize(static_cast<size_t>(problem.B * problem.H * problem.S));
  answer.lse.resize(answer.magnitude.size());
  RowWriter writer(problem);
  int64_t row = 0;
  for (int64_t b = 0; b < problem.B; ++b) {
    for (int64_t h = 0; h < problem.H; ++h) {
      for (int64_t i = 0; i < problem.S; ++i, ++row) {
        writer.Write(b, h, i, &answer.output[static_cast<size_t>(row * problem.Dv)],
                     &answer.magnitude[static_cast<size_t>(row)], &answer.lse[static_cast<size_t>(row)]);
      }
    }
  }
  return answer;
}

PairScores Scores(const Dense& problem) {
  PairScores all;
  RowWriter writer(problem);
  for (int64_t row = 0; row < problem.B * problem.H * problem.S; ++row) {
    writer.AppendScores(row / problem.S / problem.H, row / problem.S % problem.H, row % problem.S, &all);
  }
  return all;
}

double Tolerance(DType dtype, double magnitude, int64_t T, double largest, double expected) {
  const double computed = 0x1p-24 * largest * (8 + 4 * magnitude + std::sqrt(static_cast<double>(T)));
  if (dtype == DType::kF32) return computed;
  if (dtype == DType::kF16) return computed + 0x1p-11 * (std::abs(expected) + computed) + 0x1p-25;  // and subnormals
  return computed + 0x1p-8 * (std::abs(expected) + computed);
}

double CudaTolerance(DType dtype, double magnitude, int64_t T, double largest) {
  const double unit = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  const double small = dtype == DType::kF16 ? 0x1p-25 * static_cast<double>(T) : 0;
  return (unit + small + 0x1p-19 + 0x1p-20 * magnitude) * largest;
}

double LseTolerance(double magnitude, int64_t T, double expected) {
  const double size = std::abs(expected) == kInf ? 0 : std::abs(expected);
  return Tolerance(DType::kF32, magnitude, T, 1, expected) + 0x1p-22 * size;
}

}  // namespace stof::test
