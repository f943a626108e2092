// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/gemm/gemm_cases.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "tests/cpp/activation.h"
#include "tests/cpp/chain/chain_reference.h"

namespace stof::test::gemm {

const OpDescription& Description() {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ops[i]->name, "StofGemm") == 0) return *ops[i];
  }
  throw Failure{"StofGemm is not registered"};
}

std::string Describe(const Case& c) {
  std::string shape;
  for (int64_t d : c.lead) shape += std::to_string(d) + " ";
  std::string has;
  for (int i = 1; i < Part::kKinds; ++i) has += c.has[i] ? '1' : '0';
  return Text("seed ", c.seed, " type ", static_cast<int>(c.dtype), " pair ", c.pair, " [", shape, "] N ", c.N, " K ",
              c.K, " ", kActivationNames[static_cast<int>(c.activation)], " parts ", has, c.shifted ? " shifted" : "");
}

Host Draw(DType dtype, std::vector<int64_t> dims, double range, Random* random) {
  Host host;
  host.dtype = dtype;
  host.dims = std::move(dims);
  int64_t count = 1;
  for (int64_t d : host.dims) count *= d;
  // A large tensor repeats a part whose length is prime.
  constexpr int64_t kPart = 99991;
  const auto size = static_cast<size_t>(SizeOf(dtype));
  host.bytes.resize(static_cast<size_t>(count) * size);
  for (int64_t i = 0; i < std::min(count, kPart); ++i) {
    StoreFloat(dtype, random->Unit() * range, host.bytes.data() + static_cast<size_t>(i) * size);
  }
  for (size_t at = static_cast<size_t>(kPart) * size; at < host.bytes.size(); at += static_cast<size_t>(kPart) * size) {
    std::memcpy(host.bytes.data() + at, host.bytes.data(),
                std::min(host.bytes.size() - at, static_cast<size_t>(kPart) * size));
  }
  return host;
}

Problem Make(const Case& c) {
  Problem p;
  p.c = c;
  Random random(c.seed);
  std::vector<int64_t> dims = c.lead;
  dims.push_back(c.K);
  p.inputs.push_back(Draw(c.dtype, dims, 1, &random));
  const double range = 2 / std::sqrt(static_cast<double>(std::max<int64_t>(1, c.K)));
  p.inputs.push_back(Draw(c.dtype, {c.K, c.pair == 1 ? 2 * c.N : c.N}, range, &random));
  if (c.pair == 2) p.inputs.push_back(Draw(c.dtype, {c.K, c.N}, range, &random));
  std::vector<int> parts;
  for (int i = 1; i < Part::kKinds; ++i) {
    if (c.has[i]) parts.push_back(i);
  }
  for (size_t i = parts.size(); i > 1; --i)
    std::swap(parts[i - 1], parts[static_cast<size_t>(random.Range(0, static_cast<int64_t>(i) - 1))]);
  const int products = c.pair == 0 ? 1 : 2;
  std::map<int, std::string> name;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int part = parts[i];
    p.place[part] = static_cast<int>(p.inputs.size());
    const std::string x = "x" + std::to_string(products + static_cast<int>(i));
    std::vector<int64_t> lead = c.lead;
    if (part == Part::kRow) {
      if (random.OneIn(2)) lead.push_back(1);
      p.inputs.push_back(Draw(c.dtype, lead, 1, &random));
      name[part] = x + "[m]";
    } else if (part == Part::kResidual) {
      lead.push_back(c.N);
      if (random.OneIn(2)) lead = {c.M(), c.N};
      p.inputs.push_back(Draw(c.dtype, lead, 2, &random));
      name[part] = x + "[m, n]";
    } else {
      p.inputs.push_back(
          Draw(c.dtype, random.OneIn(2) ? std::vector<int64_t>{c.N} : std::vector<int64_t>{1, c.N}, 1, &random));
      name[part] = x + "[n]";
    }
  }
  const bool swapped = products == 2 && random.OneIn(2);
  std::string first = swapped ? "x1[m, n]" : "x0[m, n]", second = swapped ? "x0[m, n]" : "x1[m, n]";
  if (c.has[Part::kBias0])
    first = random.OneIn(2) ? first + " + " + name[Part::kBias0] : name[Part::kBias0] + " + " + first;
  if (c.has[Part::kBias1]) second = second + " + " + name[Part::kBias1];
  std::string lets = "axes m = x0.0, n = x0.1; let u = " + first + "; let v = " + second + "; ";
  if (products == 1) lets = "axes m = x0.0, n = x0.1; let u = " + first + "; ";
  const std::string act = kActivationNames[static_cast<int>(c.activation)];
  std::string value = c.activation == Activation::kNone ? "u" : act + "(u)";
  if (act == "silu" && random.OneIn(2)) value = "u * sigmoid(u)";
  if (products == 2) value = random.OneIn(2) ? value + " * v" : "v * " + value;
  if (c.has[Part::kScale])
    value = random.OneIn(2) ? value + " * " + name[Part::kScale] : name[Part::kScale] + " * " + value;
  if (c.has[Part::kRow]) value = value + " * " + name[Part::kRow];
  if (c.has[Part::kResidual])
    value = random.OneIn(2) ? value + " + " + name[Part::kResidual] : name[Part::kResidual] + " + " + value;
  const char* type = c.dtype == DType::kF32 ? "f32" : c.dtype == DType::kF16 ? "f16" : "bf16";
  p.text = lets + "out y0 " + type + " [m, n] = " + value;
  // The oracle counts the first product as the one with the activation.
  if (swapped) {
    p.place[0] = 1;
  }
  return p;
}

namespace {

// One element in fp64, and how far a kernel may be from it. function: relative error of the activation.
Approximate Expected(const Problem& p, int64_t m, int64_t n, double function) {
  const Case& c = p.c;
  const bool swapped = p.place[0] == 1;
  double sum[2] = {0, 0}, error[2] = {0, 0};
  for (int i = 0; i < (c.pair == 0 ? 1 : 2); ++i) {
    const int which = swapped ? 1 - i : i;
    const Host& weight = c.pair == 2 && which == 1 ? p.inputs[2] : p.inputs[1];
    const int64_t stride = c.pair == 1 ? 2 * c.N : c.N, column = c.pair == 1 && which == 1 ? c.N + n : n;
    double magnitude = 0;
    for (int64_t k = 0; k < c.K; ++k) {
      const double term = p.inputs[0].At(m * c.K + k) * weight.At(k * stride + column);
      sum[i] += term;
      magnitude += std::fabs(term);
    }
    error[i] = 0x1p-22 * magnitude;  // fp32 sums, of tensor cores too, are far from the worst order
    const int bias = i == 0 ? Part::kBias0 : Part::kBias1;
    if (c.has[bias]) sum[i] += p.inputs[static_cast<size_t>(p.place[bias])].At(n);
    error[i] += 0x1p-23 * std::fabs(sum[i]);
  }
  double y = Activate(c.activation, sum[0]);
  double e = 1.13 * error[0] + (c.activation == Activation::kNone ? 0 : function * std::fabs(y) + 3e-8);
  // cuBLASLt's GELU, which is there on a device, takes the hardware's tanh: within 2^-11 of it.
  if (function > 1e-4 && c.activation == Activation::kGeluTanh) e += 0x1p-12 * std::fabs(sum[0]);
  const auto times = [&](double x, double off) {
    e = std::fabs(y) * off + std::fabs(x) * e + off * e + 0x1p-23 * std::fabs(x * y);
    y *= x;
  };
  if (c.pair != 0) times(sum[1], error[1]);
  if (c.has[Part::kScale]) times(p.inputs[static_cast<size_t>(p.place[Part::kScale])].At(n), 0);
  if (c.has[Part::kRow]) times(p.inputs[static_cast<size_t>(p.place[Part::kRow])].At(m), 0);
  if (c.has[Part::kResidual]) {
    y += p.inputs[static_cast<size_t>(p.place[Part::kResidual])].At(m * c.N + n);
    e += 0x1p-23 * std::fabs(y);
  }
  const double unit = c.dtype == DType::kF32 ? 0x1p-24 : c.dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  const double least = c.dtype == DType::kF16 ? 0x1p-25 : 0;
  return {y, 1.01 * (e + unit * (std::fabs(y) + e) + least)};
}

}  // namespace

void Compare(const Problem& p, const std::vector<char>& bytes, size_t begin, double function) {
  const Case& c = p.c;
  const int64_t M = c.M(), size = SizeOf(c.dtype);
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i >= begin && i < begin + static_cast<size_t>(M * c.N * size)) continue;
    CHECK(static_cast<uint8_t>(bytes[i]) == 0xff, Describe(p.c), ": byte ",
          static_cast<int64_t>(i) - static_cast<int64_t>(begin), " outside of the output was written");
  }
  for (int64_t i = 0; i < M * c.N; ++i) {
    CHECK(std::isfinite(LoadFloat(c.dtype, bytes.data() + begin + static_cast<size_t>(i * size))), Describe(c), " ",
          p.text, ": element ", i / c.N, ", ", i % c.N, " is not finite or was not written");
  }
  const auto check = [&](int64_t m, int64_t n) {
    const Approximate want = Expected(p, m, n, function);
    const double got = LoadFloat(c.dtype, bytes.data() + begin + static_cast<size_t>((m * c.N + n) * size));
    CHECK(std::fabs(got - want.value) <= want.error, Describe(c), " ", p.text, ": element ", m, ", ", n, " is ", got,
          ", expected ", want.value, " within ", want.error);
  };
  if (M * c.N * std::max<int64_t>(1, c.K) <= 2000000) {
    for (int64_t i = 0; i < M * c.N; ++i) check(i / c.N, i % c.N);
    return;
  }
  Random random(c.seed + 1);
  const auto pick = [&random](int64_t size_of) {
    if (random.OneIn(4)) return size_of - 1 - random.Range(0, std::min<int64_t>(size_of - 1, 8));
    if (random.OneIn(2)) return std::min(size_of - 1, random.Range(0, size_of / 64) * 64 + random.Range(0, 1));
    return random.Range(0, size_of - 1);
  };
  const int64_t samples = std::max<int64_t>(300, 2000000 / std::max<int64_t>(1, c.K));
  for (int64_t i = 0; i < samples; ++i) check(pick(M), pick(c.N));
}

Case RandomCase(uint64_t seed, DType dtype, int64_t most) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.dtype = dtype;
  c.pair = static_cast<int>(random.Range(0, 2));
  const auto size = [&](int64_t limit) {
    if (random.OneIn(3)) return random.Range(1, limit);
    return std::max<int64_t>(1, std::min(limit, 64 * random.Range(0, limit / 64) + random.Range(-1, 1)));
  };
  c.lead =
      random.OneIn(2) ? std::vector<int64_t>{size(most)} : std::vector<int64_t>{random.Range(1, 3), size(most / 3)};
  c.N = size(most);
  c.K = size(most);
  if (random.OneIn(2)) c.N = (c.N + 7) / 8 * 8, c.K = (c.K + 7) / 8 * 8;
  c.activation = kChainActivations[random.Range(0, 4)];
  for (int i = 1; i < Part::kKinds; ++i) c.has[i] = random.OneIn(2);
  if (c.pair == 0) c.has[Part::kBias1] = false;
  c.shifted = random.OneIn(6);
  return c;
}

bool IsSampled(uint64_t seed) {
  const char* const only = std::getenv("STOF_CASE");
  if (only != nullptr) return seed == std::strtoull(only, nullptr, 10);
  const char* const sample = std::getenv("STOF_SAMPLE");
  const uint64_t step = sample == nullptr ? 1 : std::max<uint64_t>(1, std::strtoull(sample, nullptr, 10));
  return seed % step == 0;
}

}  // namespace stof::test::gemm
