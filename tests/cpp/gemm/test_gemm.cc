// SPDX-License-Identifier: Apache-2.0
// StofGemm through its description on the CPU: results against fp64, forms that are recognized, errors.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "plugins/core/host/thread_pool.h"
#include "tests/cpp/chain/chain_reference.h"
#include "tests/cpp/gemm/gemm_cases.h"
#include "tests/cpp/memory.h"
#include "tests/cpp/shape_rules.h"

namespace stof::test {
namespace {

using namespace gemm;

Status RunCpu(const std::string& text, int pair, const std::vector<Host>& inputs, int threads, size_t begin,
              std::vector<char>* bytes, Tensor* output) {
  std::unique_ptr<Op> op;
  STOF_RETURN_IF_ERROR(Description().create(Attributes(text, pair), &op));
  std::vector<Tensor> tensors;
  for (const Host& host : inputs) tensors.push_back(host.View(const_cast<char*>(host.bytes.data())));
  const int count = static_cast<int>(tensors.size());
  STOF_RETURN_IF_ERROR(op->Prepare(tensors.data(), count));
  STOF_RETURN_IF_ERROR(op->InferOutputs(tensors.data(), count, output, 1));
  CheckShapeRules(Description(), Attributes(text, pair), tensors, *output, 0);
  const int64_t size = output->Elements() * SizeOf(output->dtype);
  if (size > (int64_t{1} << 30)) return Status::Error("an output too large for a test");
  bytes->assign(static_cast<size_t>(size) + begin + kBand, static_cast<char>(0xff));
  output->data = bytes->data() + begin;
  ThreadPool pool(threads);
  Starved starved(pool.view());
  Memory memory;
  RunContext context;
  context.parallel = starved.view();
  context.allocate = Memory::Allocate;
  context.self = &memory;
  return op->Run(tensors.data(), count, output, 1, context);
}

TEST(GemmEqualsFp64) {
  const int cases = Cases(60);
  for (int i = 0; i < cases; ++i) {
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Case c = RandomCase(static_cast<uint64_t>(1000 + i), dtype, i % 8 == 0 ? 300 : 120);
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
    c.seed = 5, c.dtype = dtype, c.pair = 2, c.lead = {2, 1, 600}, c.N = Effort() < 0.1 ? 200 : 2000, c.K = 257;
    c.activation = Activation::kGelu;
    for (bool& has : c.has) has = true;
    for (int64_t K : {int64_t{257}, int64_t{0}}) {
      for (int64_t M : {int64_t{600}, int64_t{0}}) {
        c.K = K, c.lead[2] = M;
        const Problem p = Make(c);
        std::vector<char> bytes;
        Tensor output;
        const Status status = RunCpu(p.text, c.pair, p.inputs, 2, kBand, &bytes, &output);
        CHECK(status.ok(), Describe(c), ": ", status.message());
        CHECK(output.rank == 4 && output.dims[3] == c.N && output.dims[2] == M);
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

}  // namespace
}  // namespace stof::test
