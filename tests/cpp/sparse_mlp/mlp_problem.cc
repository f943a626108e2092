// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/sparse_mlp/mlp_problem.h"

#include <algorithm>
#include <cmath>

#include "tests/cpp/activation.h"
#include "tests/cpp/attention/reference.h"

namespace stof::test::sparse_mlp {
namespace {

constexpr double kRoundoff = 0x1p-24;

double At(const Values& values, int64_t i) { return values.values[static_cast<size_t>(i)]; }

// The dot product of two rows, and of their absolute values.
void Dot(const Values& x, int64_t row, const Values& w, int64_t neuron, int64_t size, double* sum,
         double* size_of_sum) {
  for (int64_t k = 0; k < size; ++k) {
    const double term = At(x, row * size + k) * At(w, neuron * size + k);
    *sum += term;
    *size_of_sum += std::fabs(term);
  }
}

// Packs values of `bits` bits, the first one of a byte in its low half; rows begin at a byte.
std::vector<char> Pack(const std::vector<uint8_t>& values, int64_t rows, int bits) {
  const auto size = static_cast<int64_t>(values.size()) / std::max<int64_t>(rows, 1);
  const int64_t stride = (size * bits + 7) / 8;
  std::vector<char> packed(static_cast<size_t>(rows * stride));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      const int value = values[static_cast<size_t>(r * size + i)];
      char& byte = packed[static_cast<size_t>(r * stride + i * bits / 8)];
      byte = static_cast<char>(byte | value << (bits == 4 && i % 2 == 1 ? 4 : 0));
    }
  }
  return packed;
}

}  // namespace

double UnitRoundoff(DType dtype) { return dtype == DType::kF32 ? kRoundoff : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8; }

std::string Describe(const Case& c) {
  return Text(
      "T", c.T, " K", c.K, " F", c.F, " N", c.N, " R", c.R, " density ", c.density, " type ", TypeText(c.dtype), " ",
      kActivationNames[static_cast<int>(c.activation)], " ", kSparseMlpSelections[static_cast<int>(c.selection)],
      c.has_up ? " up" : "", c.has_biases ? " biases" : "", c.has_thresholds ? " thresholds" : "", " bits ", c.bits,
      " block ", c.block, c.has_zero_points ? " zero points" : "", " level ", c.accuracy_level,
      c.has_quantized_predictor ? " quantized predictor" : "", c.has_predictor_relu ? " predictor with ReLU" : "");
}

Problem::Problem(const Case& of, uint64_t seed) : c(of), random_(seed) {
  input = Draw(c.T * c.K, 1);
  if (c.has_predictor()) DrawRows(c.K, &gate_weight, &gate_scales, &gate_zeros);
  if (c.has_up) DrawRows(c.K, &up_weight, &up_scales, &up_zeros);
  DrawDown();
  if (c.has_biases) gate_bias = Draw(c.F, 1), up_bias = Draw(c.F, 1), down_bias = Draw(c.N, 1);
  if (c.has_predictor()) {
    DrawFactor(c.R, c.K, &predictor_down, &predictor_down_scales);
    DrawFactor(c.F, c.R, &predictor_up, &predictor_up_scales);
  } else {
    DrawGate();
  }
  if (c.selection != SparseMlpSelection::kNonzero) DrawThresholds();
}

Values Problem::Draw(int64_t count, double scale) {
  Values drawn;
  const int64_t item = SizeOfFloat(c.dtype);
  drawn.bytes.resize(static_cast<size_t>(count * item));
  for (int64_t i = 0; i < count; ++i) {
    StoreFloat(c.dtype, scale * static_cast<double>(random_.Unit()), drawn.bytes.data() + i * item);
    drawn.values.push_back(LoadFloat(c.dtype, drawn.bytes.data() + i * item));
  }
  return drawn;
}

void Problem::DrawRows(int64_t size, Values* weight, Values* scales, Values* zeros) {
  if (c.bits == 0) {
    *weight = Draw(c.F * size, 1);
    return;
  }
  const int64_t blocks = (size + c.block - 1) / c.block, padded = blocks * c.block, levels = int64_t{1} << c.bits;
  *scales = Draw(c.F * blocks, 1.0 / static_cast<double>(levels));
  std::vector<uint8_t> values(static_cast<size_t>(c.F * padded)), points(static_cast<size_t>(c.F * blocks));
  for (uint8_t& q : values) q = static_cast<uint8_t>(random_.Range(0, levels - 1));
  for (uint8_t& q : points) q = static_cast<uint8_t>(c.has_zero_points ? random_.Range(0, levels - 1) : levels / 2);
  weight->bytes = Pack(values, c.F, c.bits);
  if (c.has_zero_points) zeros->bytes = Pack(points, c.F, c.bits);
  for (int64_t j = 0; j < c.F; ++j) {
    for (int64_t k = 0; k < size; ++k) {
      const auto at = static_cast<size_t>(j * blocks + k / c.block);
      weight->values.push_back((values[static_cast<size_t>(j * padded + k)] - points[at]) * scales->values[at]);
    }
  }
}

void Problem::DrawDown() {
  if (c.bits == 0) {
    down_weight = Draw(c.F * c.N, 1);
    return;
  }
  const int64_t groups = (c.F + c.block - 1) / c.block, levels = int64_t{1} << c.bits;
  down_scales = Draw(groups * c.N, 1.0 / static_cast<double>(levels));
  std::vector<uint8_t> values(static_cast<size_t>(c.F * c.N)), points(static_cast<size_t>(groups * c.N));
  for (uint8_t& q : values) q = static_cast<uint8_t>(random_.Range(0, levels - 1));
  for (uint8_t& q : points) q = static_cast<uint8_t>(c.has_zero_points ? random_.Range(0, levels - 1) : levels / 2);
  down_weight.bytes = Pack(values, c.F, c.bits);
  if (c.has_zero_points) down_zeros.bytes.assign(points.begin(), points.end());
  for (int64_t j = 0; j < c.F; ++j) {
    for (int64_t n = 0; n < c.N; ++n) {
      const auto at = static_cast<size_t>(j / c.block * c.N + n);
      down_weight.values.push_back((values[static_cast<size_t>(j * c.N + n)] - points[at]) * down_scales.values[at]);
    }
  }
}

// A factor of the predictor. Quantized rows have a scale each, and random values behind their size.
void Problem::DrawFactor(int64_t rows, int64_t size, Values* factor, Values* scales) {
  if (!c.has_quantized_predictor) {
    *factor = Draw(rows * size, 1);
    return;
  }
  const int64_t padded = (size + 31) / 32 * 32;
  *scales = Draw(rows, 1.0 / 128);
  for (int64_t i = 0; i < rows * padded; ++i) factor->bytes.push_back(static_cast<char>(random_.Range(0, 255)));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < size; ++k) {
      const auto q = static_cast<uint8_t>(factor->bytes[static_cast<size_t>(r * padded + k)]);
      factor->values.push_back((q - 128) * scales->values[static_cast<size_t>(r)]);
    }
  }
}

// Active neurons have values of either sign, but for relu; the others have 0, or a negative value under relu.
void Problem::DrawGate() {
  gate = Draw(c.T * c.F, 1);
  const bool is_relu = kActivationGivesZeros[static_cast<int>(c.activation)];
  const int64_t item = SizeOfFloat(c.dtype);
  for (size_t i = 0; i < gate.values.size(); ++i) {
    const bool is_active = (static_cast<double>(random_.Unit()) + 1) / 2 < c.density;
    double& x = gate.values[i];
    if (is_relu) x = is_active ? std::fabs(x) : -std::fabs(x);
    if (!is_relu && !is_active) x = 0;
    StoreFloat(c.dtype, x, gate.bytes.data() + static_cast<int64_t>(i) * item);
  }
}

std::vector<double> Problem::Scores() const {
  Values projected;
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t r = 0; r < c.R; ++r) {
      double sum = 0, size = 0;
      Dot(input, t, predictor_down, r, c.K, &sum, &size);
      projected.values.push_back(c.has_predictor_relu && sum < 0 ? 0 : sum);
    }
  }
  std::vector<double> scores;
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t j = 0; j < c.F; ++j) {
      double sum = 0, size = 0;
      Dot(projected, t, predictor_up, j, c.R, &sum, &size);
      scores.push_back(sum);
    }
  }
  return scores;
}

// Between two values that are far from each other, so that rounding decides nothing.
void Problem::DrawThresholds() {
  std::vector<double> values;
  if (c.has_predictor()) {
    values = Scores();
  } else {
    for (const double x : gate.values) values.push_back(std::fabs(Activate(c.activation, x)));
  }
  const auto between = [this](std::vector<double> sorted) {
    std::sort(sorted.begin(), sorted.end());
    if (sorted.empty()) return 0.0f;
    const auto count = static_cast<int64_t>(sorted.size());
    const auto wanted = static_cast<int64_t>(static_cast<double>(count) * (1 - c.density));
    double best = -1, found = sorted.back() + 1;
    for (int64_t i = std::max<int64_t>(1, wanted - 8); i < std::min(count, wanted + 8); ++i) {
      const double gap = sorted[static_cast<size_t>(i)] - sorted[static_cast<size_t>(i - 1)];
      if (gap > best) best = gap, found = sorted[static_cast<size_t>(i)] - gap / 2;
    }
    return static_cast<float>(found);
  };
  if (!c.has_thresholds) {
    threshold = {between(values)};
    return;
  }
  for (int64_t j = 0; j < c.F; ++j) {
    std::vector<double> own;
    for (int64_t t = 0; t < c.T; ++t) own.push_back(values[static_cast<size_t>(t * c.F + j)]);
    threshold.push_back(between(own));
  }
}

SparseMlpArgs Problem::Args(void* output) {
  SparseMlpArgs a;
  a.T = c.T, a.K = c.K, a.F = c.F, a.N = c.N, a.R = c.R;
  a.dtype = c.dtype, a.activation = c.activation, a.selection = c.selection;
  a.bits = c.bits, a.block_size = c.bits > 0 ? c.block : 0, a.accuracy_level = c.accuracy_level;
  const auto weight = [](Values* data, Values* scales, Values* zeros) {
    SparseMlpWeight found;
    found.data = data->data();
    if (!scales->bytes.empty()) found.scales = scales->data();
    if (!zeros->bytes.empty()) found.zero_points = zeros->data();
    return found;
  };
  a.input = input.data();
  if (!c.has_predictor()) a.gate = gate.data();
  if (c.has_predictor()) a.gate_weight = weight(&gate_weight, &gate_scales, &gate_zeros);
  if (c.has_up) a.up_weight = weight(&up_weight, &up_scales, &up_zeros);
  a.down_weight = weight(&down_weight, &down_scales, &down_zeros);
  if (c.has_biases) {
    if (c.has_predictor()) a.gate_bias = gate_bias.data();
    if (c.has_up) a.up_bias = up_bias.data();
    a.down_bias = down_bias.data();
  }
  a.threshold = threshold.data();
  a.threshold_stride = c.has_thresholds ? 1 : 0;
  Values none;
  a.predictor_down = weight(&predictor_down, &predictor_down_scales, &none);
  a.predictor_up = weight(&predictor_up, &predictor_up_scales, &none);
  a.has_predictor_relu = c.has_predictor_relu;
  a.output = output;
  return a;
}

bool Problem::RoundsToken(int64_t t) const {
  constexpr int64_t kBlock = 64;
  return least_bf16_tokens > 0 && std::min(kBlock, c.T - t / kBlock * kBlock) >= least_bf16_tokens;
}

void Problem::Expect(std::vector<double>* output, std::vector<double>* tolerance, double unit) const {
  const auto bias = [this](const Values& values, int64_t i) { return c.has_biases ? At(values, i) : 0.0; };
  const std::vector<double> scores = c.has_predictor() ? Scores() : std::vector<double>();
  output->assign(static_cast<size_t>(c.T * c.N), 0.0);
  std::vector<double> size(output->size(), 0.0);
  // What int8 inputs add to a dot product, relative to its size in absolute values: half a step of 127, and the
  // largest value of a block is a few times its mean.
  const double rounding = c.bits > 0 && c.accuracy_level == 4 ? 0.02 : 0.0;
  // Tensor cores add a step of K to a sum at a time, and cut off what does not fit.
  const double sums = kRoundoff * (unit > 0 ? 64 : 8), weights = c.bits > 0 ? unit : 0;
  const double smallest = unit > 0 && c.dtype == DType::kF16 ? 0x1p-25 : 0;
  Values rounded_input = input;
  for (double& x : rounded_input.values) x = Rounded(DType::kBF16, x);
  for (int64_t t = 0; t < c.T; ++t) {
    const auto tokens_of = [&](int weight) -> const Values& {
      return RoundsToken(t) && is_rounded[weight] ? rounded_input : input;
    };
    std::vector<double> h(static_cast<size_t>(c.F)), h_error(static_cast<size_t>(c.F));
    std::vector<bool> is_active(static_cast<size_t>(c.F), false);
    for (int64_t j = 0; j < c.F; ++j) {
      double a = 0, error = 0, size_of_a = 0;
      if (c.has_predictor()) {
        if (scores[static_cast<size_t>(t * c.F + j)] <= static_cast<double>(threshold[c.has_thresholds ? j : 0]))
          continue;
        double sum = bias(gate_bias, j);
        size_of_a = std::fabs(sum);
        Dot(tokens_of(0), t, gate_weight, j, c.K, &sum, &size_of_a);
        a = Activate(c.activation, sum);
        const double slope = IsQuadratic(c.activation) ? 2 * std::fabs(sum) + 1 : 1.2;
        error = slope * (size_of_a * (sums + rounding + weights) + std::fabs(sum) * unit + smallest) +
                std::fabs(a) * 8 * kRoundoff;
      } else {
        a = Activate(c.activation, At(gate, t * c.F + j));
        error = std::fabs(a) * 8 * kRoundoff;
        const bool needs = c.selection == SparseMlpSelection::kNonzero
                               ? a != 0
                               : !(std::fabs(a) <= static_cast<double>(threshold[c.has_thresholds ? j : 0]));
        if (!needs) continue;
      }
      is_active[static_cast<size_t>(j)] = true;
      double up = 1, size_of_up = 1, up_error = 0;
      if (c.has_up) {
        up = bias(up_bias, j), size_of_up = std::fabs(up);
        Dot(tokens_of(1), t, up_weight, j, c.K, &up, &size_of_up);
        up_error =
            size_of_up * (sums + rounding + weights + unit * (c.has_biases ? 1 : 0)) + std::fabs(up) * unit + smallest;
      }
      h[static_cast<size_t>(j)] = a * up;
      h_error[static_cast<size_t>(j)] = error * std::fabs(up) + (std::fabs(a) + error) * up_error +
                                        std::fabs(a * up) * (8 * kRoundoff + unit) + smallest;
    }
    for (int64_t j = 0; j < c.F; ++j) {
      double value = h[static_cast<size_t>(j)];
      double off = h_error[static_cast<size_t>(j)];
      if (!is_active[static_cast<size_t>(j)]) continue;
      if (rounding > 0) {  // half a step in int8 of the largest value that shares the scale
        const int64_t first = j / c.block * c.block;
        double largest = 0;
        for (int64_t i = first; i < std::min(c.F, first + c.block); ++i) {
          largest = std::max(largest, std::fabs(h[static_cast<size_t>(i)]) + h_error[static_cast<size_t>(i)]);
        }
        off += largest / 254 * 1.001;
      }
      if (RoundsToken(t) &&
          is_rounded[2]) {  // a kernel's value may be rounded to another number, where one lies between
        off = std::max(std::fabs(Rounded(DType::kBF16, value + off) - Rounded(DType::kBF16, value)),
                       std::fabs(Rounded(DType::kBF16, value - off) - Rounded(DType::kBF16, value)));
        value = Rounded(DType::kBF16, value);
      }
      for (int64_t n = 0; n < c.N; ++n) {
        const double w = At(down_weight, j * c.N + n);
        (*output)[static_cast<size_t>(t * c.N + n)] += value * w;
        size[static_cast<size_t>(t * c.N + n)] += off * std::fabs(w) + std::fabs(value * w) * (2 * sums + weights);
      }
    }
  }
  tolerance->clear();
  const double unit_of_output = UnitRoundoff(c.dtype);
  const double least = c.dtype == DType::kF16 ? 0x1p-24 : 1e-30;
  for (size_t i = 0; i < output->size(); ++i) {
    (*output)[i] += bias(down_bias, static_cast<int64_t>(i) % std::max<int64_t>(1, c.N));
    tolerance->push_back(size[i] + std::fabs((*output)[i]) * (unit_of_output + 4 * kRoundoff) + least);
  }
}

std::vector<Case> DrawCases(int count) {
  Random random(42);
  std::vector<Case> cases;
  const std::vector<int64_t> sizes = {1, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 100, 130};
  for (int i = 0; i < count; ++i) {
    Case c;
    c.T = random.Pick<int64_t>({1, 1, 2, 3, 4, 5, 8, 16, 17, 25, 31, 48, 63, 64, 65, 100});
    c.K = random.Pick(sizes), c.F = random.Pick(sizes), c.N = random.Pick(sizes), c.R = random.Pick(sizes);
    if (random.OneIn(8)) c.K = random.Pick<int64_t>({1023, 1024, 1030, 2100});
    if (random.OneIn(8)) c.N = random.Pick<int64_t>({511, 512, 530, 1100, 4500});
    if (random.OneIn(8)) c.F = random.Pick<int64_t>({600, 1100});
    c.density = random.Pick<double>({0, 0.001, 0.01, 0.1, 0.5, 0.9, 1});
    c.dtype = random.Pick<DType>({DType::kF32, DType::kF32, DType::kF16, DType::kBF16});
    c.activation = static_cast<Activation>(random.Range(0, kActivations - 1));
    c.selection = static_cast<SparseMlpSelection>(random.Range(0, 2));
    c.has_up = c.has_predictor() || !random.OneIn(3);
    c.has_biases = random.OneIn(2), c.has_thresholds = random.OneIn(2);
    c.bits = random.Pick<int>({0, 0, 4, 8});
    c.block = random.Pick<int64_t>({16, 32, 64, 128, 256});
    c.has_zero_points = random.OneIn(2);
    c.accuracy_level = c.bits > 0 && random.OneIn(2) ? 4 : 0;
    cases.push_back(c);
  }
  return cases;
}

}  // namespace stof::test::sparse_mlp
