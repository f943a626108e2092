// SPDX-License-Identifier: Apache-2.0
// Attention with relative terms of the score beside the same attention without them: calls in a captured graph, timed
// with events, median of replays. Each row prints microseconds, TFLOPS of Q Kᵀ and P V alone, and the rate as a share
// of that without terms, by the library's choice and by the tiled kernel.
//
// bench_cuda_relative [fp16 | bf16 | fp32]
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/attention/relative/layout.h"
#include "cuda/bench/bench_graph.h"
#include "cuda/bench/bench_inputs.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/ops/attention_relative.h"

namespace {

using stof::DType;

struct Row {
  const char* name;
  const char* mask;
  int64_t B, H, S, D;
  const char* index[stof::cuda::kRelativeTerms];  // expressions of the terms; nullptr: not given
  int64_t rows;                                   // of each table; 0: a row for each distance
};

constexpr const char* kDistance = "k - q + S - 1";
constexpr const char* kClamped = "max(0, min(511, q - k + 256))";
constexpr Row kRows[] = {
    {"distance", "", 1, 16, 4096, 64, {kDistance}, 0},
    {"distance, of keys", "", 1, 16, 4096, 64, {nullptr, nullptr, kDistance}, 0},
    {"both", "", 1, 16, 4096, 64, {kClamped, nullptr, kClamped}, 512},
    {"both", "", 8, 12, 512, 64, {kClamped, nullptr, kClamped}, 512},
    {"distance", "abs(q - k) <= 128", 1, 16, 4096, 64, {kDistance}, 0},
    {"distance", "", 1, 16, 4096, 128, {kDistance}, 0},
    {"grid of 64", "", 1, 12, 4096, 64, {"q // 64 - k // 64 + 63", "q % 64 - k % 64 + 63"}, 127},
};

// Random numbers in (-1, 1) on the device.
void* RandomTensor(DType dtype, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<char> bytes(static_cast<size_t>(count * stof::SizeOf(dtype)));
  for (int64_t i = 0; i < count; ++i) {
    const float x = static_cast<float>(static_cast<int32_t>(random())) * 0x1p-31f;
    if (dtype == DType::kF32) {
      std::memcpy(&bytes[static_cast<size_t>(4 * i)], &x, 4);
      continue;
    }
    // fp16: sign, exponents 10 to 14, mantissa; bf16: the upper half of an fp32 number.
    const uint32_t bits = static_cast<uint32_t>(random());
    uint32_t wide = 0;
    std::memcpy(&wide, &x, 4);
    const auto half =
        static_cast<uint16_t>(dtype == DType::kBF16 ? wide >> 16 : (bits & 0x83ffu) | (10u + (bits >> 16) % 5u) << 10);
    std::memcpy(&bytes[static_cast<size_t>(2 * i)], &half, 2);
  }
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, bytes.size()));
  CHECK_CUDA(cudaMemcpy(memory, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  return memory;
}

struct Workspace {
  char* memory = nullptr;
  size_t size = 0, used = 0;
  static void* Allocate(void* self, size_t bytes) {
    auto* const space = static_cast<Workspace*>(self);
    const size_t at = (space->used + 255) / 256 * 256;
    if (at + bytes > space->size) return nullptr;
    space->used = at + bytes;
    return space->memory + at;
  }
};

double Time(const stof::AttentionArgs& args, const stof::AttentionMask& mask, const stof::ExprSizes& sizes,
            Workspace* space, const std::string& kernel) {
  ExitUnlessOk(stof::cuda::AttentionRequests().Force(kernel));
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = Workspace::Allocate, context.self = space;
  const double us = TimeGraph(stream, 1, [&] {
    space->used = 0;
    ExitUnlessOk(stof::FindCudaBackend()->attention.run(args, nullptr, mask, sizes, {}, context));
  });
  CHECK_CUDA(cudaStreamDestroy(stream));
  stof::cuda::AttentionRequests().Release();
  return us;
}

std::shared_ptr<const stof::RelativeRowArrays> BindTable(const char* index, const stof::ExprSizes& sizes, int64_t rows,
                                                         stof::RelativeTable* table) {
  stof::MaskExpr expr;
  ExitUnlessOk(stof::MaskExpr::ParseInteger(index, {}, &expr));
  stof::SeparatedExpr separated;
  ExitUnlessOk(stof::SeparatedExpr::Make(expr, &separated) ? stof::Status() : stof::Status::Error("not separable"));
  std::shared_ptr<const stof::RelativeRowArrays> made;
  ExitUnlessOk(stof::RelativeRowArrays::Make("relative_key", separated, sizes, rows, &made));
  table->index = made->view();
  return made;
}

void Measure(const Row& row, DType dtype) {
  stof::AttentionArgs args;
  const int64_t count = row.B * row.H * row.S * row.D;
  args.shape = {row.B, row.H, row.H, row.S, row.S, row.D, row.D, dtype};
  std::vector<void*> memory;
  const auto draw = [&](int64_t size) {
    memory.push_back(RandomTensor(dtype, size, static_cast<uint32_t>(memory.size())));
    return memory.back();
  };
  args.query.data = draw(count), args.key.data = draw(count), args.value.data = draw(count);
  args.output.data = draw(count);
  args.query.stride = args.key.stride = args.value.stride =
      args.output.stride = {row.H * row.S * row.D, row.S * row.D, row.D};
  args.scores.scale = 1.0f / std::sqrt(static_cast<float>(row.D));
  const stof::ExprSizes sizes = {row.B, row.H, row.S, row.S, 0};
  std::shared_ptr<const stof::AttentionMask> mask;
  ExitUnlessOk(stof::MakeAttentionMask(row.mask, {}, &mask));
  Workspace space;
  space.size = size_t{2} << 30;
  CHECK_CUDA(cudaMalloc(&space.memory, space.size));
  const std::string tiled = dtype == DType::kF32 ? "fp32" : "sm80";
  const double chosen = Time(args, *mask, sizes, &space, ""), plain = Time(args, *mask, sizes, &space, tiled);
  std::vector<std::shared_ptr<const stof::RelativeRowArrays>> rows;
  for (int i = 0; i < stof::cuda::kRelativeTerms; ++i) {
    if (row.index[i] == nullptr) continue;
    stof::RelativeTable& table = stof::cuda::RelativeTermOf(&args.scores, i);
    table.rows = row.rows > 0 ? row.rows : 2 * row.S - 1, table.columns = row.D;
    table.stride_h = table.rows * table.columns;
    table.dtype = dtype;
    table.data = draw(row.H * table.stride_h);
    rows.push_back(BindTable(row.index[i], sizes, table.rows, &table));
  }
  const double us = Time(args, *mask, sizes, &space, "");
  const double flops = 4.0 * static_cast<double>(row.B * row.H * row.S * row.S * row.D);
  std::printf(
      "%-18s B%-2ld H%-2ld S%-5ld D%-3ld %-18s %9.1f us %6.1f TFLOPS  without: %9.1f us, %.3f of its rate; %s "
      "%9.1f us, %.3f\n",
      row.name, row.B, row.H, row.S, row.D, row.mask, us, flops / us * 1e-6, chosen, chosen / us, tiled.c_str(), plain,
      plain / us);
  std::fflush(stdout);
  for (void* block : memory) CHECK_CUDA(cudaFree(block));
  CHECK_CUDA(cudaFree(space.memory));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string type = argc > 1 ? argv[1] : "fp16";
  if (argc > 2 || (type != "fp16" && type != "bf16" && type != "fp32")) {
    std::fprintf(stderr, "usage: bench_cuda_relative [fp16 | bf16 | fp32]\n");
    return 2;
  }
  const DType dtype = type == "fp32" ? DType::kF32 : type == "bf16" ? DType::kBF16 : DType::kF16;
  for (const Row& row : kRows) Measure(row, dtype);
  return 0;
}
