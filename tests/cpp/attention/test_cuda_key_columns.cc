// SPDX-License-Identifier: Apache-2.0
// StofAttention on a GPU under masks with key columns, which are gathered, against the definition in double precision.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/columns/gather.h"
#include "cuda/attention/families.h"
#include "plugins/core/ops/attention.h"
#include "tests/cpp/attention/reference.h"
#include "tests/cpp/cached_attention/cuda_node.h"
#include "tests/cpp/check.h"
#include "tests/cpp/device_memory.h"
#include "tests/cpp/forced_kernel.h"
#include "tests/cpp/map_attributes.h"

namespace stof::test::attention {
namespace {

using cached_attention::Buffer;

struct ColumnMask {
  const char* text;
  bool (*allows)(int64_t h, int64_t q, int64_t k);
};
constexpr ColumnMask kMasks[] = {
    {"k <= q and (q - k < 96 or k % 37 == 0)",
     [](int64_t, int64_t q, int64_t k) { return k <= q && (q - k < 96 || k % 37 == 0); }},
    {"k <= q and (q - k < 50 or (k + 7 * (h // 2)) % 41 == 0)",
     [](int64_t h, int64_t q, int64_t k) { return k <= q && (q - k < 50 || (k + 7 * (h / 2)) % 41 == 0); }},
    {"abs(q - k) < 33 or k % 29 == 3",
     [](int64_t, int64_t q, int64_t k) { return std::abs(q - k) < 33 || k % 29 == 3; }},
    {"k <= q and k % 31 == 30", [](int64_t, int64_t q, int64_t k) { return k <= q && k % 31 == 30; }},  // empty rows
    {"k <= q and (q - k < 20 or q - k == 300 or k % 64 == 5)",
     [](int64_t, int64_t q, int64_t k) { return k <= q && (q - k < 20 || q - k == 300 || k % 64 == 5); }},
};

struct ColumnCase {
  int64_t B = 1, H = 4, G = 2, S = 768, T = 768, D = 64;
  DType dtype = DType::kF16;
  int mask = 0;
  bool has_sink = false;
  const char* kernel = "";
};

std::string Describe(const ColumnCase& c) {
  return Text("B ", c.B, " H ", c.H, " G ", c.G, " S ", c.S, " T ", c.T, " D ", c.D, " dtype ",
              static_cast<int>(c.dtype), " mask ", kMasks[c.mask].text, " sink ", c.has_sink, " kernel '", c.kernel,
              "'");
}

void CheckGathered(const ColumnCase& c) {
  MaskExpr expr;
  CHECK(MaskExpr::Parse(kMasks[c.mask].text, {}, &expr).ok());
  AttentionArgs args;
  args.shape = {c.B, c.H, c.G, c.S, c.T, c.D, c.D, c.dtype};
  CHECK(Check(args).ok(), Check(args).message());
  cuda::GatheredAttention gathered;
  CHECK(cuda::ChooseGathered(args, nullptr, *MakeAttentionMask(expr), {c.B, c.H, c.S, c.T, c.T - c.S}, &gathered),
        Describe(c), " is not gathered");
}

void RunCase(const ColumnCase& c, uint64_t seed) {
  CheckGathered(c);
  Random random(seed);
  MapAttributes attributes;
  attributes.strings = {{"mask", kMasks[c.mask].text}, {"operands", c.has_sink ? "sink" : ""}};
  attributes.ints = {{"query_offset", 1}};
  std::unique_ptr<Op> op;
  CHECK(AttentionDescription()->create(attributes, &op).ok());
  DeviceMemory memory;
  std::vector<Buffer> given;
  std::vector<Tensor> inputs;
  const std::vector<std::vector<int64_t>> shapes = {
      {c.B, c.H, c.S, c.D}, {c.B, c.G, c.T, c.D}, {c.B, c.G, c.T, c.D}, {c.H}};
  for (size_t i = 0; i < (c.has_sink ? 4u : 3u); ++i) {
    int64_t count = 1;
    for (const int64_t dim : shapes[i]) count *= dim;
    given.emplace_back(c.dtype, count);
    given.back().Draw(&random);
    inputs.push_back(TensorOfShape(c.dtype, shapes[i]));
    inputs.back().data = memory.Upload(given.back().data(), given.back().bytes().size());
  }
  Buffer output(c.dtype, c.B * c.H * c.S * c.D);
  output.Poison();
  Tensor result = TensorOfShape(c.dtype, shapes[0]);
  result.data = memory.Upload(output.data(), output.bytes().size());
  RunContext context;
  context.on_cuda = true;
  context.allocate = DeviceMemory::Allocate;
  context.self = &memory;
  const int count = static_cast<int>(inputs.size());
  CHECK(op->Prepare(inputs.data(), count).ok());
  const ForcedKernel forced(cuda::AttentionRequests(), c.kernel);
  const Status status = op->Run(inputs.data(), count, &result, 1, context);
  CHECK(status.ok(), Describe(c), ": ", status.message());
  CHECK_CUDA(cudaDeviceSynchronize());
  CHECK_CUDA(cudaMemcpy(output.data(), result.data, output.bytes().size(), cudaMemcpyDeviceToHost));
  for (int64_t b = 0; b < c.B; ++b) {
    Dense dense;
    dense.H = c.H, dense.G = c.G, dense.S = c.S, dense.T = c.T, dense.D = dense.Dv = c.D;
    dense.scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(c.D)));
    double largest = 0;
    for (int64_t i = 0; i < c.H * c.S * c.D; ++i) dense.query.push_back(given[0].Get(b * c.H * c.S * c.D + i));
    for (int64_t i = 0; i < c.G * c.T * c.D; ++i) {
      dense.key.push_back(given[1].Get(b * c.G * c.T * c.D + i));
      dense.value.push_back(given[2].Get(b * c.G * c.T * c.D + i));
      largest = std::max(largest, std::abs(dense.value.back()));
    }
    for (int64_t h = 0; h < c.H && c.has_sink; ++h) dense.sink.push_back(given[3].Get(h));
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t i = 0; i < c.S; ++i) {
        for (int64_t k = 0; k < c.T; ++k) {
          dense.allowed.push_back(kMasks[c.mask].allows(h, c.T - c.S + i, k) ? 1 : 0);
        }
      }
    }
    const Answer answer = Attend(dense);
    for (int64_t row = 0; row < c.H * c.S; ++row) {
      for (int64_t d = 0; d < c.D; ++d) {
        const double got = output.Get((b * c.H * c.S + row) * c.D + d);
        const double want = answer.output[static_cast<size_t>(row * c.D + d)];
        const double magnitude = answer.magnitude[static_cast<size_t>(row)];
        const double tolerance =
            Tolerance(c.dtype, magnitude, c.T, largest, want) + CudaTolerance(c.dtype, magnitude, c.T, largest);
        CHECK(std::abs(got - want) <= tolerance, Describe(c), ": b ", b, " h ", row / c.S, " row ", row % c.S, " d ", d,
              ": ", got, ", expected ", want, " ± ", tolerance);
      }
    }
  }
  CountCases(1);
}

TEST(CudaKeyColumnsEqualTheDefinition) {
  uint64_t seed = 0;
  for (int mask = 0; mask < static_cast<int>(std::size(kMasks)); ++mask) {
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
      for (const int64_t D : {64, 96, 128, 192}) {
        ColumnCase c;
        c.mask = mask, c.dtype = dtype, c.D = D;
        c.has_sink = seed % 3 == 0;
        c.G = seed % 2 == 0 ? 4 : 2;
        c.S = seed % 4 == 1 ? 700 : 768, c.T = c.S + (seed % 5 == 2 ? 130 : 0);
        c.B = seed % 7 == 6 ? 2 : 1;
        RunCase(c, seed++);
      }
    }
  }
}

// Every kernel that takes the problem.
TEST(CudaKeyColumnsByEveryKernel) {
  for (const int64_t D : {64, 128}) {
    for (const char* kernel : {"1", "2", "3", "4", "5", "6", "sm80", "rows"}) {
      if (!cuda::AttentionRequests().Force(kernel).ok()) continue;
      cuda::AttentionRequests().Release();
      ColumnCase c;
      c.D = D, c.kernel = kernel, c.mask = 1;
      RunCase(c, 91);
    }
  }
}

}  // namespace
}  // namespace stof::test::attention
