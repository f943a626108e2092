// SPDX-License-Identifier: Apache-2.0
// How long block masks take that are made on the device: captured graphs of one build and of 20
// (which tells what one more costs), one head layout.
// bench_cuda_mask [ROW]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "cuda/mask/build/mask_builder.h"
#include "plugins/core/mask/block_mask_builder.h"

namespace {

struct Row {
  const char* name;
  const char* mask;
  int64_t length;
  int stretch;  // mean length of a segment
};
constexpr Row kRows[] = {
    {"window", "abs(q - k) <= 128", 32768, 1},
    {"causal", "k <= q", 32768, 1},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 32768, 1},
    {"segments", "segment_q[b, q] == segment_k[b, k]", 32768, 1000},
    {"packed", "k <= q and segment_q[b, q] == segment_k[b, k]", 32768, 1000},
    {"packed64", "k <= q and segment_q[b, q] == segment_k[b, k]", 32768, 64},
    {"packwindow", "abs(q - k) <= 128 and segment_q[b, q] == segment_k[b, k]", 32768, 1000},
    {"lengths", "k < lengths[b] and q - k <= 1024 and k <= q", 32768, 1},
    {"dilated", "abs(q - k) <= 256 and (q - k) % 2 == 0", 32768, 1},
    {"every", "(q - k) % 5 != 0", 8192, 1},
    {"bool8k", "table0[q, k]", 8192, 1},
};
constexpr int kBuilds = 20;

void* OnDevice(const void* from, size_t bytes) {
  void* to = nullptr;
  CHECK_CUDA(cudaMalloc(&to, bytes));
  CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  return to;
}

stof::Tensor Describe(void* data, stof::DType dtype, std::initializer_list<int64_t> dims) {
  stof::Tensor tensor = stof::TensorOfShape(dtype, dims);
  tensor.data = data;
  return tensor;
}

void Measure(const Row& row, int n, int sm_count) {
  const int64_t S = row.length;
  std::vector<int64_t> ids(static_cast<size_t>(S));
  uint32_t state = 1;
  for (size_t i = 1; i < ids.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    ids[i] = ids[i - 1] + ((state >> 8) % static_cast<uint32_t>(row.stretch) == 0 ? 1 : 0);
  }
  std::vector<int64_t> lengths = {S - 1000};
  std::vector<uint8_t> pairs;
  std::vector<std::pair<std::string, stof::Tensor>> tables;
  stof::cuda::MaskInputs inputs;
  if (std::strstr(row.mask, "table0") != nullptr) {
    pairs.resize(static_cast<size_t>(S * S));
    for (uint8_t& x : pairs) {
      state = state * 1664525u + 1013904223u;
      x = state >> 31;
    }
    tables.emplace_back("table0", Describe(pairs.data(), stof::DType::kBool, {S, S}));
    inputs.emplace_back("table0", Describe(OnDevice(pairs.data(), pairs.size()), stof::DType::kBool, {S, S}));
  }
  void* vector = OnDevice(ids.data(), 8 * ids.size());
  inputs.emplace_back("segment_q", Describe(vector, stof::DType::kI64, {1, S}));
  inputs.emplace_back("segment_k", Describe(vector, stof::DType::kI64, {1, S}));
  inputs.emplace_back("lengths", Describe(OnDevice(lengths.data(), 8), stof::DType::kI64, {1}));
  stof::MaskExpr expr;
  stof::Status status = stof::MaskExpr::Parse(row.mask, tables, &expr);
  const stof::ExprSizes sizes = {1, 1, S, S, 0};
  stof::cuda::MaskProgram program;
  const auto start = std::chrono::steady_clock::now();
  if (status.ok()) status = stof::cuda::CompileMask(stof::MaskExpr(), expr, sizes, inputs, &program);
  const double compiled = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
    std::exit(1);
  }
  double host = 0;
  if (!expr.UsesRuntime()) {
    stof::BlockMask mask;
    const auto begin = std::chrono::steady_clock::now();
    status = stof::BuildBlockMask(expr, sizes, stof::cuda::kTileRows, n, &mask);
    host = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  }
  stof::cuda::MaskBuild build;
  build.program = &program, build.sizes = sizes, build.sm_count = sm_count;
  build.part = {0, 1, 0, 1, 0, S};
  build.tile = {stof::cuda::kTileRows, n, true};  // as the kernels with 128 rows read bits
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, stof::cuda::MaskBytes(build)));
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::cuda::DeviceMask view;
  const auto run = [&] {
    CHECK_CUDA(static_cast<cudaError_t>(stof::cuda::LaunchMaskBuild(build, memory, stream, &view)));
  };
  const double once = TimeGraph(stream, 1, run), one = TimeGraph(stream, kBuilds, run);
  std::printf("%-11s S%-6ld tile %dx%-4d %8.1f us, one of %d %7.1f us  (compiling %.1f us, on the host %.0f us)\n",
              row.name, S, stof::cuda::kTileRows, n, once, kBuilds, one, compiled, host);
  std::fflush(stdout);
  CHECK_CUDA(cudaStreamDestroy(stream));
  CHECK_CUDA(cudaFree(memory));
  CHECK_CUDA(cudaFree(vector));
}

}  // namespace

int main(int argc, char** argv) {
  int sm_count = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
  for (const Row& row : kRows) {
    if (argc >= 2 && std::strcmp(argv[1], row.name) != 0) continue;
    for (const int n : {64, 128}) Measure(row, n, sm_count);
  }
  return 0;
}
