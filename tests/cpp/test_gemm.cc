// SPDX-License-Identifier: Apache-2.0
// StofGemm through its description: results against fp64, forms that are recognized, errors. With STOF_WITH_CUDA the
// same table runs on the device.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "plugins/core/gemm.h"
#include "plugins/core/thread_pool.h"
#include "tests/cpp/chain_reference.h"
#include "tests/cpp/fixtures.h"
#include "tests/cpp/reference.h"

#ifdef STOF_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace stof::test {
namespace {

class Attributes final : public AttributeReader {
 public:
  Attributes(std::string text, int64_t pair) : text_(std::move(text)), pair_(pair) {}
  bool Int(const char* name, int64_t* value) const override {
    if (std::strcmp(name, "pair") != 0) return false;
    *value = pair_;
    return true;
  }
  bool Float(const char*, float*) const override { return false; }
  bool String(const char* name, std::string* value) const override {
    if (std::strcmp(name, "epilogue") != 0) return false;
    *value = text_;
    return true;
  }

 private:
  std::string text_;
  int64_t pair_;
};

const OpDescription& Description() {
  int count = 0;
  const OpDescription* const* ops = AllOps(&count);
  for (int i = 0; i < count; ++i) {
    if (std::strcmp(ops[i]->name, "StofGemm") == 0) return *ops[i];
  }
  throw Failure{"StofGemm is not registered"};
}

// ---- one problem ----
struct Part {
  enum Kind { kNone, kBias0, kBias1, kScale, kRow, kResidual, kKinds };
};

struct Case {
  uint64_t seed = 0;
  DType dtype = DType::kF32;
  int pair = 0;
  std::vector<int64_t> lead = {1};  // dimensions of a but the last
  int64_t N = 1, K = 1;
  GemmActivation activation = GemmActivation::kNone;
  bool has[Part::kKinds] = {};
  bool shifted = false;  // tensors begin two bytes beyond 16-byte boundaries
  int64_t M() const {
    int64_t m = 1;
    for (int64_t d : lead) m *= d;
    return m;
  }
};

constexpr const char* kActivations[] = {"", "relu", "gelu", "gelu_tanh", "silu"};

std::string Describe(const Case& c) {
  std::string shape;
  for (int64_t d : c.lead) shape += std::to_string(d) + " ";
  std::string has;
  for (int i = 1; i < Part::kKinds; ++i) has += c.has[i] ? '1' : '0';
  return Text("seed ", c.seed, " type ", static_cast<int>(c.dtype), " pair ", c.pair, " [", shape, "] N ", c.N, " K ",
              c.K, " ", kActivations[static_cast<int>(c.activation)], " parts ", has, c.shifted ? " shifted" : "");
}

struct Host {
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<char> bytes;
  int64_t Count() const { return static_cast<int64_t>(bytes.size()) / SizeOf(dtype); }
  double At(int64_t i) const { return LoadFloat(dtype, bytes.data() + i * SizeOf(dtype)); }
  Tensor View(void* data) const {
    Tensor tensor;
    tensor.dtype = dtype;
    tensor.rank = static_cast<int32_t>(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) tensor.dims[i] = dims[i];
    tensor.data = data;
    return tensor;
  }
};

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

struct Problem {
  Case c;
  std::string text;
  std::vector<Host> inputs;
  int place[Part::kKinds] = {};  // the input of each part
};

// The text says the form's parts in an order of its own.
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
  std::string act = kActivations[static_cast<int>(c.activation)];
  std::string value = act.empty() ? "u" : act + "(u)";
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

double Activate(GemmActivation activation, double x) {
  switch (activation) {
    case GemmActivation::kRelu:
      return x < 0 ? 0 : x;
    case GemmActivation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case GemmActivation::kGeluTanh:
      return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case GemmActivation::kSilu:
      return x / (1 + std::exp(-x));
    default:
      return x;
  }
}

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
  double e = 1.13 * error[0] + (c.activation == GemmActivation::kNone ? 0 : function * std::fabs(y) + 3e-8);
  // cuBLASLt's GELU, which is there on a device, takes the hardware's tanh: within 2^-11 of it.
  if (function > 1e-4 && c.activation == GemmActivation::kGeluTanh) e += 0x1p-12 * std::fabs(sum[0]);
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

constexpr size_t kBand = 256;

// All elements of a small output; of a large one the last rows and columns, those around tiles' edges, and some.
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

Case Random1(uint64_t seed, DType dtype, int64_t most) {
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
  c.activation = static_cast<GemmActivation>(random.Range(0, 4));
  for (int i = 1; i < Part::kKinds; ++i) c.has[i] = random.OneIn(2);
  if (c.pair == 0) c.has[Part::kBias1] = false;
  c.shifted = random.OneIn(6);
  return c;
}

#ifndef STOF_WITH_CUDA
Status RunCpu(const std::string& text, int pair, const std::vector<Host>& inputs, int threads, size_t begin,
              std::vector<char>* bytes, Tensor* output) {
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(Description().create(Attributes(text, pair), &op));
  std::vector<Tensor> tensors;
  for (const Host& host : inputs) tensors.push_back(host.View(const_cast<char*>(host.bytes.data())));
  const int count = static_cast<int>(tensors.size());
  STOF_RETURN_IF_ERROR(op->Prepare(tensors.data(), count));
  STOF_RETURN_IF_ERROR(op->InferOutputs(tensors.data(), count, output, 1));
  const int64_t size = output->Elements() * SizeOf(output->dtype);
  if (size > (int64_t{1} << 30)) return Status::Error("an output too large for a test");
  bytes->assign(static_cast<size_t>(size) + begin + kBand, static_cast<char>(0xff));
  output->data = bytes->data() + begin;
  ThreadPool pool(threads);
  Memory memory;
  RunContext context;
  context.parallel = pool.view();
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(tensors.data(), count, output, 1, context);
}

TEST(GemmEqualsFp64) {
  const int cases = Cases(60);
  for (int i = 0; i < cases; ++i) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Case c = Random1(static_cast<uint64_t>(1000 + i), dtype, i % 8 == 0 ? 300 : 120);
      const Problem p = Make(c);
      std::vector<char> bytes, again;
      Tensor output;
      Status status = RunCpu(p.text, c.pair, p.inputs, 1 + i % 4, kBand, &bytes, &output);
      CHECK(status.ok(), Describe(c), " ", p.text, ": ", status.message());
      Compare(p, bytes, kBand, 2e-6);
      status = RunCpu(p.text, c.pair, p.inputs, 3, kBand, &again, &output);
      CHECK(status.ok() && bytes == again, Describe(c), ": another result with three threads");
      CountCases(1);
    }
  }
}

// Sizes beyond a block of rows and of K, and none at all.
TEST(GemmEdges) {
  for (DType dtype : {DType::kF32, DType::kF16}) {
    Case c;
    c.seed = 5, c.dtype = dtype, c.pair = 2, c.lead = {2, 1, 600}, c.N = 2000, c.K = 257;
    c.activation = GemmActivation::kGelu;
    for (bool& has : c.has) has = true;
    for (int64_t K : {int64_t{257}, int64_t{0}}) {
      for (int64_t M : {int64_t{600}, int64_t{0}}) {
        c.K = K, c.lead[2] = M;
        const Problem p = Make(c);
        std::vector<char> bytes;
        Tensor output;
        const Status status = RunCpu(p.text, c.pair, p.inputs, 2, kBand, &bytes, &output);
        CHECK(status.ok(), Describe(c), ": ", status.message());
        CHECK(output.rank == 4 && output.dims[3] == 2000 && output.dims[2] == M);
        Compare(p, bytes, kBand, 2e-6);
        CountCases(1);
      }
    }
  }
}

// Epilogues beyond the CUDA kernels' form, against the chains' own definition: products of small integers are exact.
TEST(GemmEpiloguesEqualChains) {
  const char* const bodies[] = {
      "x0[m, n]",
      "tanh(x0[m, n] * 0.1) + x1[m, n]",
      "select(x0[m, n] > x1[n], x0[m, n], x2[m] * 2)",
      "x0[m, n] / (1 + abs(x0[m, n])) * x3[]",
      "f16(x0[m, n] * 0.3) + m * 0.5 - n",
      "max(x0[m, n], x1[n]) * x2[m] + pow(abs(x0[m, n]), 0.5)",
      "select(n < 3, x1[m, n], x0[m, n])",
      "erf(x0[m, n] + x1[m, n]) * gelu(x0[m, n])",
  };
  for (size_t i = 0; i < std::size(bodies); ++i) {
    for (DType dtype : {DType::kF32, DType::kF16}) {
      Random random(i + 1);
      const std::string text = std::string("axes m = x0.0, n = x0.1; out y0 ") +
                               (dtype == DType::kF32 ? "f32" : "f16") + " [m, n] = " + bodies[i];
      GemmEpilogue epilogue;
      Status status = ParseGemm(text, 0, &epilogue);
      CHECK(status.ok(), text, ": ", status.message());
      const int64_t M = random.Range(1, 40), N = random.Range(4, 90), K = random.Range(1, 20);
      Host a = Draw(dtype, {M, K}, 1, &random), b = Draw(dtype, {K, N}, 1, &random);
      for (Host* host : {&a, &b}) {
        for (int64_t e = 0; e < host->Count(); ++e) {
          StoreFloat(dtype, static_cast<double>(random.Range(-2, 2)), host->bytes.data() + e * SizeOf(dtype));
        }
      }
      std::vector<Host> inputs = {a, b};
      ChainArray product;
      product.dims = {M, N};
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t n = 0; n < N; ++n) {
          double sum = 0;
          for (int64_t k = 0; k < K; ++k) sum += a.At(m * K + k) * b.At(k * N + n);
          product.values.push_back(sum);
        }
      }
      std::vector<ChainArray> arrays = {product};
      for (size_t x = 1; x < epilogue.reads.size(); ++x) {
        const GemmRead read = epilogue.reads[x];
        const std::vector<int64_t> dims = read == GemmRead::kMatrix    ? std::vector<int64_t>{M, N}
                                          : read == GemmRead::kColumns ? std::vector<int64_t>{N}
                                          : read == GemmRead::kRows    ? std::vector<int64_t>{M}
                                                                       : std::vector<int64_t>();
        inputs.push_back(Draw(DType::kF32, dims, 3, &random));
        ChainArray array;
        array.dims = dims;
        for (int64_t e = 0; e < inputs.back().Count(); ++e) array.values.push_back(inputs.back().At(e));
        arrays.push_back(array);
      }
      std::vector<char> bytes;
      Tensor output;
      status = RunCpu(text, 0, inputs, 2, kBand, &bytes, &output);
      CHECK(status.ok(), text, ": ", status.message());
      const std::vector<ChainAnswer> answers = EvaluateChain(text, arrays);
      for (int64_t e = 0; e < M * N; ++e) {
        const Approximate& want = answers[0].values[static_cast<size_t>(e)];
        const double got = LoadFloat(dtype, bytes.data() + kBand + e * SizeOf(dtype));
        CHECK(std::fabs(got - want.value) <= ChainTolerance(dtype, want) || want.error > 1e30, text, " element ", e,
              ": ", got, ", expected ", want.value);
      }
      CountCases(M * N);
    }
  }
}

TEST(GemmForms) {
  const struct {
    int pair;
    const char* body;
    const char* form;  // nullptr: right, but of no form
  } kTexts[] = {
      {0, "x0[m, n]", "none"},
      {0, "x1[n] + x0[m, n]", "bias0"},
      {0, "x2[m, n] + x0[m, n] + x1[n]", "bias0 residual"},
      {0, "x0[m, n] + (x1[n] + x2[m, n])", "bias0 residual"},
      {0, "gelu(x0[m, n] + x1[n])", "bias0 gelu"},
      {0, "gelu_tanh(x0[m, n])", "gelu_tanh"},
      {0, "relu(x0[m, n] + x1[n]) + x2[m, n]", "bias0 relu residual"},
      {0, "(x0[m, n] + x1[n]) * x2[n] + x3[m, n]", "bias0 scale residual"},
      {0, "x0[m, n] * x1[m]", "row"},
      {0, "(x0[m, n] + x1[n]) * sigmoid(x0[m, n] + x1[n])", "bias0 silu"},
      {1, "gelu(x0[m, n]) * x1[m, n]", "gelu pair"},
      {2, "x0[m, n] * silu(x1[m, n])", "silu pair"},
      {2, "silu(x0[m, n] + x2[n]) * (x1[m, n] + x3[n])", "bias0 silu bias1 pair"},
      {1, "x0[m, n] * x1[m, n]", "pair"},
      {2, "sigmoid(x0[m, n]) * x0[m, n] * x1[m, n]", "silu pair"},
      {0, "gelu(x0[m, n]) + x1[n]", nullptr},
      {0, "x0[m, n] + x1[n] + x2[n]", nullptr},
      {0, "x0[m, n] + x1[m, n] + x2[m, n]", nullptr},
      {0, "gelu(x0[m, n] + x1[n]) * x1[n]", nullptr},
      {0, "x0[m, n] * x0[m, n]", nullptr},
      {0, "tanh(x0[m, n])", nullptr},
      {0, "x0[m, n] * 2", nullptr},
      {1, "gelu(x0[m, n]) * gelu(x1[m, n])", nullptr},
      {1, "gelu(x0[m, n]) * x0[m, n]", nullptr},
      {1, "x0[m, n] + x1[m, n]", nullptr},
      {1, "gelu(x1[m, n])", nullptr},
      {0, "x0[m, n] + m", nullptr},
  };
  for (const auto& t : kTexts) {
    GemmEpilogue epilogue;
    const Status status =
        ParseGemm(std::string("axes m = x0.0, n = x0.1; out y0 f16 [m, n] = ") + t.body, t.pair, &epilogue);
    CHECK(status.ok(), t.body, ": ", status.message());
    CHECK(epilogue.has_form == (t.form != nullptr), t.body);
    if (t.form != nullptr) {
      const std::string text = epilogue.form.Text(t.pair != 0);
      CHECK(text == t.form, t.body, ": ", text, ", expected ", t.form);
    } else {
      CHECK(epilogue.why_not.rfind("CUDA:", 0) == 0, epilogue.why_not);
    }
    CountCases(1);
  }
  GemmEpilogue swapped;
  CHECK(ParseGemm("axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[m, n] * gelu(x1[m, n])", 2, &swapped).ok());
  CHECK(swapped.form.swapped);
}

TEST(GemmRefuses) {
  const struct {
    int64_t pair;
    const char* text;
    const char* why;
  } kTexts[] = {
      {3, "", "attribute pair is 3"},
      {-1, "", "attribute pair is -1"},
      {1, "", "attribute epilogue is empty"},
      {0, "axes m = x0.0; out y0 f16 [m] = x0[m]", "found 1 axes, expected two"},
      {0, "axes m = x0.1, n = x0.0; out y0 f16 [m, n] = 1", "another size of axis m"},
      {0, "axes m = x0.0, n = x0.1 / 2; out y0 f16 [m, n] = 1", "another size of axis n"},
      {0, "axes m = x0.0, n = 5; out y0 f16 [m, n] = 1", "another size of axis n"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [n, m] = 1", "other dimensions of y0"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = 1; out y1 f16 [m, n] = 2", "found 2 outputs"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[m, n] - mean(x0[m, n])", "found a sum, mean"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[n, m]", "another read of the product x0"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[m, 2 * n]", "another read of the product x0"},
      {1, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[m, n] * x1[n]", "another read of the product x1"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x1[n + 1]", "another read of x1"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x1[0]", "another read of x1"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x1[n] + x1[m]", "read in two ways"},
      {0, "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = what", "attribute epilogue: chain, line 2"},
  };
  for (const auto& t : kTexts) {
    std::unique_ptr<Op> op;
    const Status status = Description().create(Attributes(t.text, t.pair), &op);
    CHECK(!status.ok() && status.message().find(t.why) != std::string::npos, t.text, ": ", status.message());
    CountCases(1);
  }
  // Shapes and types, when it runs.
  Random random(1);
  const std::string text =
      "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = gelu(x0[m, n] + x1[n]) * x2[m] + x3[m, n] * x4[]";
  const auto good = [&] {
    const DType h = DType::kF16;
    return std::vector<Host>{Draw(h, {2, 3, 8}, 1, &random),  Draw(h, {8, 16}, 1, &random),
                             Draw(h, {16}, 1, &random),       Draw(h, {2, 3}, 1, &random),
                             Draw(h, {2, 3, 16}, 1, &random), Draw(h, {1, 1}, 1, &random)};
  };
  const struct {
    size_t input;
    std::vector<int64_t> dims;
    const char* why;
  } kShapes[] = {
      {0, {8}, "input 0 (a) has shape [8]"},
      {0, {2, 3, 7}, "input 1 (b) has shape [8, 16], expected [K, N] with K = 7"},
      {1, {1, 8, 16}, "input 1 (b) has shape [1, 8, 16]"},
      {2, {15}, "input 2 (x1) has shape [15], expected one element for each column"},
      {2, {16, 1}, "input 2 (x1) has shape [16, 1]"},
      {3, {6}, "input 3 (x2) has shape [6], expected one element for each row"},
      {3, {3, 2}, "input 3 (x2) has shape [3, 2]"},
      {4, {3, 2, 16}, "input 4 (x3) has shape [3, 2, 16]"},
      {4, {16}, "input 4 (x3) has shape [16]"},
      {5, {2}, "input 5 (x4) has shape [2], expected one element"},
  };
  std::vector<char> bytes;
  Tensor output;
  CHECK(RunCpu(text, 0, good(), 1, kBand, &bytes, &output).ok());
  for (const auto& shape : kShapes) {
    std::vector<Host> inputs = good();
    inputs[shape.input] = Draw(DType::kF16, shape.dims, 1, &random);
    const Status status = RunCpu(text, 0, inputs, 1, kBand, &bytes, &output);
    CHECK(!status.ok() && status.message().find(shape.why) != std::string::npos, shape.why, ": ", status.message());
    CountCases(1);
  }
  std::vector<Host> odd = {Draw(DType::kF32, {2, 4}, 1, &random), Draw(DType::kF32, {4, 5}, 1, &random)};
  Status status =
      RunCpu("axes m = x0.0, n = x0.1; out y0 f32 [m, n] = x0[m, n] * x1[m, n]", 1, odd, 1, kBand, &bytes, &output);
  CHECK(!status.ok() && status.message().find("two halves of columns") != std::string::npos, status.message());
  odd[1] = Draw(DType::kF16, {4, 5}, 1, &random);
  status = RunCpu("", 0, odd, 1, kBand, &bytes, &output);
  CHECK(!status.ok() && status.message().find("another type than a") != std::string::npos, status.message());
}

#else  // STOF_WITH_CUDA

#define CHECK_CUDA(call) CHECK((call) == cudaSuccess, cudaGetErrorString(cudaGetLastError()))

struct Device {
  void* data = nullptr;
  explicit Device(size_t bytes) { CHECK_CUDA(cudaMalloc(&data, std::max<size_t>(bytes, 16))); }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data); }
};

// repeats: further runs, whose bits must be the first one's.
void RunDevice(const Case& c, int repeats) {
  const Problem p = Make(c);
  std::unique_ptr<Op> op;
  Status status = Description().create(Attributes(p.text, c.pair), &op);
  CHECK(status.ok(), p.text, ": ", status.message());
  const size_t shift = c.shifted ? 2 : 0;
  std::vector<std::unique_ptr<Device> > memory;
  std::vector<Tensor> inputs;
  for (const Host& host : p.inputs) {
    memory.push_back(std::make_unique<Device>(host.bytes.size() + shift));
    char* const at = static_cast<char*>(memory.back()->data) + shift;
    CHECK_CUDA(cudaMemcpy(at, host.bytes.data(), host.bytes.size(), cudaMemcpyHostToDevice));
    inputs.push_back(host.View(at));
  }
  const int count = static_cast<int>(inputs.size());
  Tensor output;
  CHECK(op->Prepare(inputs.data(), count).ok());
  // Every other one as in a runtime that lets the first run of a shape time kernels.
  if (c.seed % 2 == 1) CHECK(op->ReadyNode(inputs.data(), count, true, 1).ok());
  status = op->InferOutputs(inputs.data(), count, &output, 1);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  DevicePlan plan;
  status = op->PlanDevice(inputs.data(), count, &plan);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  const size_t size = static_cast<size_t>(output.Elements() * SizeOf(output.dtype)), begin = kBand + shift;
  std::vector<char> poison(size + 2 * kBand + shift, static_cast<char>(0xff)), first, again(poison.size());
  Device place(poison.size());
  output.data = static_cast<char*>(place.data) + begin;
  struct Scratch {
    Device memory;
    size_t left;
    static void* Allocate(void* self, size_t bytes) {
      auto* const scratch = static_cast<Scratch*>(self);
      if (bytes > scratch->left) return nullptr;
      scratch->left = 0;  // one block a run
      return scratch->memory.data;
    }
  } scratch{Device(plan.workspace), 0};
  if (plan.workspace > 0) CHECK_CUDA(cudaMemset(scratch.memory.data, 0xff, plan.workspace));
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = Scratch::Allocate;
  context.self = &scratch;
  for (int i = 0; i <= repeats; ++i) {
    CHECK_CUDA(cudaMemcpyAsync(place.data, poison.data(), poison.size(), cudaMemcpyHostToDevice, stream));
    scratch.left = plan.workspace;
    status = op->Run(inputs.data(), count, &output, 1, context);
    CHECK(status.ok(), Describe(c), ": ", status.message());
    CHECK_CUDA(cudaMemcpyAsync(again.data(), place.data, again.size(), cudaMemcpyDeviceToHost, stream));
    const cudaError_t error = cudaStreamSynchronize(stream);
    CHECK(error == cudaSuccess, Describe(c), ": ", cudaGetErrorString(error));
    if (i == 0) {
      first = again;
      const bool gelu = c.activation == GemmActivation::kGelu || c.activation == GemmActivation::kGeluTanh;
      Compare(p, first, begin, gelu ? 5e-4 : 2e-6);
    }
    CHECK(first == again, Describe(c), ": another result in run ", i);
  }
  CHECK_CUDA(cudaStreamDestroy(stream));
  CountCases(1);
}

// Every n-th case alone (STOF_SAMPLE), or one by its seed (STOF_CASE).
bool IsTaken(uint64_t seed) {
  const char* const only = std::getenv("STOF_CASE");
  if (only != nullptr) return seed == std::strtoull(only, nullptr, 10);
  const char* const sample = std::getenv("STOF_SAMPLE");
  const uint64_t step = sample == nullptr ? 1 : std::max<uint64_t>(1, std::strtoull(sample, nullptr, 10));
  return seed % step == 0;
}

void RunSeeds(uint64_t begin, uint64_t end, int64_t most, bool vectors) {
  for (uint64_t seed = begin; seed < end; ++seed) {
    if (!IsTaken(seed)) continue;
    Case c = Random1(seed, seed % 2 == 0 ? DType::kF16 : DType::kBF16, most);
    if (vectors) c.N = (c.N + 7) / 8 * 8, c.K = (c.K + 7) / 8 * 8, c.shifted = false;
    RunDevice(c, 1);
  }
}

TEST(CudaGemmEqualsFp64) {
  RunSeeds(0, 120, 700, true);
  RunSeeds(120, 200, 300, false);
}

TEST(CudaGemmSizes) {
  uint64_t seed = 10000;
  for (int64_t M : {1, 7, 128, 512, 4096, 8192}) {
    for (int pair : {0, 1, 2}) {
      for (int64_t odd : {0, 1}) {
        Case c;
        c.seed = ++seed;
        if (!IsTaken(seed)) continue;
        Random random(seed);
        c.dtype = seed % 2 == 0 ? DType::kF16 : DType::kBF16;
        c.pair = pair;
        c.lead = {M};
        c.N = (pair == 0 ? 3072 : 1152) + 3 * odd, c.K = M > 512 ? 768 + odd : 1600 + odd;
        c.activation = static_cast<GemmActivation>(random.Range(0, 4));
        for (int i = 1; i < Part::kKinds; ++i) c.has[i] = random.OneIn(2);
        if (pair == 0) c.has[Part::kBias1] = false;
        RunDevice(c, M == 512 ? 50 : 2);
      }
    }
  }
}

// The epilogues that cuBLASLt has, where it may be taken, at sizes of few and of many tiles.
TEST(CudaGemmPlainEpilogues) {
  uint64_t seed = 20000;
  for (int64_t M : {1, 128, 2100}) {
    for (int64_t K : {8, 768, 3072}) {
      for (GemmActivation activation : {GemmActivation::kNone, GemmActivation::kRelu, GemmActivation::kGeluTanh}) {
        for (int parts = 0; parts < (activation == GemmActivation::kNone ? 4 : 2); ++parts) {
          Case c;
          c.seed = ++seed;
          if (!IsTaken(seed)) continue;
          c.dtype = seed % 3 == 0 ? DType::kBF16 : DType::kF16;
          c.lead = {M};
          c.N = 768, c.K = K;
          c.activation = activation;
          c.has[Part::kBias0] = parts % 2 == 1, c.has[Part::kResidual] = parts / 2 == 1;
          RunDevice(c, 2);
        }
      }
    }
  }
}

// One product of nothing, and one without rows.
TEST(CudaGemmEdges) {
  for (int64_t K : {0, 8}) {
    for (int64_t M : {0, 3}) {
      Case c;
      c.seed = 3, c.dtype = DType::kF16, c.lead = {M}, c.N = 72, c.K = K;
      c.activation = GemmActivation::kSilu;
      c.has[Part::kBias0] = true;
      RunDevice(c, 1);
    }
  }
}

TEST(CudaGemmRefuses) {
  Random random(1);
  std::unique_ptr<Op> op;
  CHECK(Description().create(Attributes("axes m = x0.0, n = x0.1; out y0 f16 [m, n] = tanh(x0[m, n])", 0), &op).ok());
  Tensor inputs[2] = {Draw(DType::kF16, {2, 8}, 1, &random).View(nullptr),
                      Draw(DType::kF16, {8, 8}, 1, &random).View(nullptr)};
  DevicePlan plan;
  Status status = op->PlanDevice(inputs, 2, &plan);
  CHECK(!status.ok() && status.message().rfind("CUDA:", 0) == 0, status.message());
  CHECK(Description().create(Attributes("", 0), &op).ok());
  CHECK(op->PlanDevice(inputs, 2, &plan).ok());
  inputs[0].dtype = inputs[1].dtype = DType::kF32;
  status = op->PlanDevice(inputs, 2, &plan);
  CHECK(!status.ok() && status.message().find("take fp16 and bf16") != std::string::npos, status.message());
}
#endif  // STOF_WITH_CUDA

}  // namespace
}  // namespace stof::test
