// SPDX-License-Identifier: Apache-2.0
// StofGemm as a plugin: whole lives against fp64, and what its kernels do not take.
#include <cmath>

#include "tests/cpp/attention/reference.h"
#include "tests/cpp/check.h"
#include "tests/trt/harness.h"
#include "tests/trt/place.h"

namespace stof::test {
namespace {

struct One {
  const char* epilogue;
  int pair;
  std::vector<std::vector<int64_t>> in;
  std::vector<int64_t> out;
  double (*value)(double p0, double p1, double x, double y);  // of the products and further inputs, where there are
};

double Gelu(double x) { return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0))); }

const std::vector<One>& All() {
  static const std::vector<One> all = {
      {"axes m = x0.0, n = x0.1; out y0 f16 [m, n] = gelu(x0[m, n] + x1[n])",
       0,
       {{2, 9, 64}, {64, 72}, {72}},
       {2, 9, 72},
       [](double p0, double, double x, double) { return Gelu(p0 + x); }},
      {"axes m = x0.0, n = x0.1; out y0 f16 [m, n] = x0[m, n] + x1[n] + x2[m, n]",
       0,
       {{130, 40}, {40, 24}, {24}, {130, 24}},
       {130, 24},
       [](double p0, double, double x, double y) { return p0 + x + y; }},
      {"axes m = x0.0, n = x0.1; out y0 f16 [m, n] = gelu(x0[m, n]) * x1[m, n]",
       1,
       {{3, 16}, {16, 128}},
       {3, 64},
       [](double p0, double p1, double, double) { return Gelu(p0) * p1; }},
      {"axes m = x0.0, n = x0.1; out y0 f16 [m, n] = silu(x0[m, n]) * x1[m, n]",
       2,
       {{1, 1, 8}, {8, 8}, {8, 8}},
       {1, 1, 8},
       [](double p0, double p1, double, double) { return p0 / (1 + std::exp(-p0)) * p1; }},
  };
  return all;
}

Held CreateGemm(const One& one) {
  Attributes attributes;
  attributes.strings["epilogue"] = one.epilogue;
  attributes.ints = {{"pair", one.pair}, {"gemm_id", 1}};
  OwnedFields fields(attributes);
  return Held(FindCreator("StofGemm")->createPlugin("layer", fields.get(), TensorRTPhase::kBUILD));
}

int64_t Count(const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= d;
  return count;
}

void Live(const One& one, DType dtype, Random* random) {
  const DataType type = dtype == DType::kF16 ? DataType::kHALF : DataType::kBF16;
  const Held built = CreateGemm(one);
  CHECK(built.plugin != nullptr, one.epilogue);
  const auto count = static_cast<int32_t>(one.in.size());
  FakeBuilder builder;
  std::vector<nvinfer1::DimsExprs> shapes, out(1);
  std::vector<nvinfer1::PluginTensorDesc> plain;
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds;
  const std::vector<DataType> types(one.in.size(), type);
  for (const std::vector<int64_t>& dims : one.in) {
    shapes.push_back(builder.Dims(dims));
    plain.push_back(Desc(type, dims));
    bounds.push_back(Bounds(type, dims, dims, dims));
  }
  plain.push_back(Desc(type, one.out));
  bounds.push_back(Bounds(type, one.out, one.out, one.out));
  DataType out_type = DataType::kINT8;
  CHECK(built.build->getNbOutputs() == 1);
  CHECK(built.build->getOutputDataTypes(&out_type, 1, types.data(), count) == 0 && out_type == type);
  CHECK(built.build->getOutputShapes(shapes.data(), count, nullptr, 0, out.data(), 1, builder) == 0, one.epilogue);
  CHECK(FakeBuilder::Values(out[0]) == one.out, one.epilogue);
  for (int32_t i = 0; i <= count; ++i) CHECK(built.build->supportsFormatCombination(i, bounds.data(), count, 1), i);
  CHECK(built.build->configurePlugin(bounds.data(), count, bounds.data() + count, 1) == 0, one.epilogue);
  CHECK(built.build->getNbTactics() == 0);
  // None without a device; on one what cuBLASLt may ask for.
  const size_t workspace = built.build->getWorkspaceSize(bounds.data(), count, bounds.data() + count, 1);
  CHECK(workspace <= size_t{9} << 20, workspace);

  OwnedFields file(*built.runtime->getFieldsToSerialize());
  const Held loaded(FindCreator("StofGemm")->createPlugin("layer", file.get(), TensorRTPhase::kRUNTIME));
  CHECK(loaded.plugin != nullptr);
  const Held context(loaded.runtime->attachToContext(nullptr));
  CHECK(context.runtime->onShapeChange(plain.data(), count, plain.data() + count, 1) == 0, one.epilogue);
  const cudaStream_t stream = ThreadStream();
  const auto size = static_cast<size_t>(SizeOf(dtype));
  std::vector<std::vector<double>> values;
  std::vector<Memory> memory;
  std::vector<const void*> inputs;
  for (const std::vector<int64_t>& dims : one.in) {
    values.emplace_back(static_cast<size_t>(Count(dims)));
    memory.emplace_back(values.back().size() * size);
    for (size_t i = 0; i < values.back().size(); ++i) {
      char* at = memory.back().host() + i * size;
      StoreFloat(dtype, random->Unit(), at);
      values.back()[i] = LoadFloat(dtype, at);
    }
    memory.back().Upload(stream);
    inputs.push_back(memory.back().address());
  }
  const Memory output(static_cast<size_t>(Count(one.out)) * size);
  output.Upload(stream);
  const Memory scratch(workspace);
  void* outputs[] = {output.address()};
  CHECK(context.runtime->enqueue(plain.data(), plain.data() + count, inputs.data(), outputs,
                                 workspace == 0 ? nullptr : scratch.address(), stream) == 0);
  output.Download(stream);
  const int64_t K = one.in[0].back(), N = one.out.back(), M = Count(one.out) / N, stride = one.in[1].back();
  const int weights = one.pair == 2 ? 2 : 1;
  const auto further = [&](int i, int64_t m, int64_t n) {
    const auto at = static_cast<size_t>(1 + weights + i);
    if (at >= values.size()) return 0.0;
    return values[at][static_cast<size_t>(one.in[at].size() == 1 ? n : m * N + n)];
  };
  for (int64_t m = 0; m < M; ++m) {
    for (int64_t n = 0; n < N; ++n) {
      double p0 = 0, p1 = 0;
      for (int64_t k = 0; k < K; ++k) {
        const double a = values[0][static_cast<size_t>(m * K + k)];
        p0 += a * values[1][static_cast<size_t>(k * stride + n)];
        if (one.pair == 1) p1 += a * values[1][static_cast<size_t>(k * stride + N + n)];
        if (one.pair == 2) p1 += a * values[2][static_cast<size_t>(k * stride + n)];
      }
      const double want = one.value(p0, p1, further(0, m, n), further(1, m, n));
      const double got = LoadFloat(dtype, output.host() + static_cast<size_t>(m * N + n) * size);
      const double allowed = (dtype == DType::kF16 ? 1e-3 : 8e-3) * (std::fabs(want) + 1e-2);
      CHECK(std::fabs(got - want) <= allowed, one.epilogue, " row ", m, " column ", n, ": ", got, ", expected ", want);
    }
  }
}

}  // namespace

TEST(TrtGemmLife) {
  Random random(11);
  for (const One& one : All()) {
    for (const DType dtype : {DType::kF16, DType::kBF16}) {
      Live(one, dtype, &random);
      CountCases(1);
    }
  }
}

TEST(TrtGemmRefuses) {
  const One& one = All()[0];
  const Held held = CreateGemm(one);
  const auto configured = [&](DataType type, std::vector<std::vector<int64_t>> in) {
    std::vector<nvinfer1::DynamicPluginTensorDesc> bounds;
    in.push_back(one.out);
    for (const std::vector<int64_t>& dims : in) bounds.push_back(Bounds(type, dims, dims, dims));
    const auto count = static_cast<int32_t>(in.size()) - 1;
    return held.build->configurePlugin(bounds.data(), count, bounds.data() + count, 1) == 0;
  };
  CHECK(configured(DataType::kHALF, one.in));
  CHECK(!configured(DataType::kFLOAT, one.in), "fp32");
  CHECK(!configured(DataType::kHALF, {{2, 9, 64}, {63, 72}, {72}}), "another K");
  CHECK(!configured(DataType::kHALF, {{2, 9, 64}, {64, 72}, {71}}), "another bias");
  CHECK(!configured(DataType::kHALF, {{2, 9, 64}, {64, 72}}), "no bias");
  CHECK(!configured(DataType::kHALF, {{2, 9, 64}, {64, 72}, {72}, {72}}), "an input more");
  for (const char* text : {"out", "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = sum(x0[m, n])"}) {
    One other = one;
    other.epilogue = text;
    CHECK(CreateGemm(other).plugin == nullptr, text);
  }
  // What the CPU computes and no kernel does.
  One other = one;
  other.epilogue = "axes m = x0.0, n = x0.1; out y0 f16 [m, n] = sin(x0[m, n] + x1[n])";
  const Held sine = CreateGemm(other);
  CHECK(sine.plugin != nullptr);
  std::vector<nvinfer1::DynamicPluginTensorDesc> bounds;
  for (const std::vector<int64_t>& dims : {one.in[0], one.in[1], one.in[2], one.out}) {
    bounds.push_back(Bounds(DataType::kHALF, dims, dims, dims));
  }
  CHECK(sine.build->configurePlugin(bounds.data(), 3, bounds.data() + 3, 1) != 0, "no kernel");
  CountCases(9);
}

}  // namespace stof::test
