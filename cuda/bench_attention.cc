// SPDX-License-Identifier: Apache-2.0
// The CUDA attention kernel alone: one call as a captured graph, timed with events, median of replays. Prints useful
// TFLOPS (allowed pairs), TFLOPS on the tiles that the mask keeps, and the build time of the block mask.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention_sm90.h"
#include "plugins/core/block_mask_builder.h"
#include "plugins/core/cuda_backend.h"

namespace {

struct Row {
  const char* name;
  const char* mask;
  int64_t B, H, S, D;
};

constexpr int kReplays = 80;

constexpr Row kRows[] = {
    {"dense", "", 1, 16, 4096, 64},
    {"causal", "k <= q", 1, 16, 4096, 64},
    {"window-128", "abs(q - k) <= 128", 1, 16, 4096, 64},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 16, 4096, 64},
    {"dilated", "abs(q - k) <= 256 and (q - k) % 2 == 0", 1, 16, 4096, 64},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 16, 4096, 64},
    {"bits", "(q - k) % 5 != 0", 1, 16, 4096, 64},
    {"dense", "", 16, 12, 512, 64},
    {"window-128", "abs(q - k) <= 128", 16, 12, 512, 64},
    {"dense", "", 1, 32, 8192, 128},
    {"bits", "(q - k) % 5 != 0", 1, 32, 8192, 128},
    {"causal", "k <= q", 1, 32, 8192, 128},
    {"window-128", "abs(q - k) <= 128", 1, 32, 8192, 128},
    {"longformer", "abs(q - k) <= 128 or k < 64 or q < 64", 1, 32, 8192, 128},
    {"s2", "k <= q and (q // 64 - k // 64 < 8 or (k // 64 + h) % 8 == 0)", 1, 32, 8192, 128},
};

#define CHECK_CUDA(call)                                                   \
  do {                                                                     \
    const cudaError_t error_ = (call);                                     \
    if (error_ != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

void* RandomHalves(int64_t count, uint32_t seed) {
  std::vector<uint16_t> values(static_cast<size_t>(count));
  std::mt19937 random(seed);
  // fp16 in (-2, 2): sign, exponents 10 to 15, mantissa.
  for (uint16_t& x : values) {
    const uint32_t bits = random();
    x = static_cast<uint16_t>((bits & 0x83ffu) | (10u + (bits >> 16) % 6u) << 10);
  }
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, values.size() * 2));
  CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  return memory;
}

void* NoMemory(void*, size_t) { return nullptr; }

void Measure(const Row& row) {
  stof::AttentionArgs args;
  args.B = row.B, args.H = args.G = row.H, args.S = args.T = row.S, args.D = args.Dv = row.D;
  args.dtype = stof::DType::kF16;
  const int64_t count = row.B * row.H * row.S * row.D;
  args.query = RandomHalves(count, 1), args.key = RandomHalves(count, 2), args.value = RandomHalves(count, 3);
  args.output = RandomHalves(count, 4);
  args.query_stride = args.key_stride = args.value_stride =
      args.output_stride = {row.H * row.S * row.D, row.S * row.D, row.D};
  args.scale = 1.0f / std::sqrt(static_cast<float>(row.D));
  std::shared_ptr<const stof::AttentionMask> mask;
  stof::Status status = stof::MakeAttentionMask(row.mask, {}, &mask);
  const stof::ExprSizes sizes = {row.B, row.H, row.S, row.S, 0};
  double tiles = 1, pairs = 1, build = 0;
  const int m = 128, n = 128;
  if (status.ok() && row.mask[0] != '\0') {
    stof::BlockMask block;
    const auto start = std::chrono::steady_clock::now();
    status = stof::BuildBlockMask(mask->parts.fixed, sizes, m, n, &block);
    build = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    double kept = 0, whole = 0;
    for (int64_t h = 0; h < row.H; ++h) {
      const int64_t table = block.TableOf(0, h);
      for (int64_t r = table * block.rows; r < (table + 1) * block.rows; ++r) {
        kept += block.row_ptr[static_cast<size_t>(r) + 1] - block.row_ptr[static_cast<size_t>(r)];
        whole += static_cast<double>(row.S) / n;
        for (int32_t i = block.row_ptr[static_cast<size_t>(r)]; i < block.row_ptr[static_cast<size_t>(r) + 1]; ++i) {
          if (block.bits_id[static_cast<size_t>(i)] < 0) {
            pairs += m * n;
          } else {
            const size_t words = m * n / 32;
            for (size_t w = 0; w < words; ++w)
              pairs += __builtin_popcount(
                  block.bits[static_cast<size_t>(block.bits_id[static_cast<size_t>(i)]) * words + w]);
          }
        }
      }
    }
    tiles = kept / whole;
    pairs = (pairs - 1) / (static_cast<double>(row.H) * static_cast<double>(row.S) * static_cast<double>(row.S));
  }
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = NoMemory;
  const auto run = [&] {
    if (status.ok()) status = stof::FindCudaBackend()->attention(args, nullptr, *mask, sizes, {}, context);
    if (!status.ok()) {
      std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
      std::exit(1);
    }
  };
  run();
  CHECK_CUDA(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kReplays; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(executable, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kReplays / 4) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2), times.end());
  const double us = 1e3 * static_cast<double>(times[times.size() / 2]);
  const double flops = 4.0 * static_cast<double>(row.B * row.H * row.S * row.S * row.D);
  std::printf(
      "%-11s B%-2ld H%-2ld S%-5ld D%-3ld %9.1f us  %6.1f useful %6.1f on tiles TFLOPS  tiles %.3f  build %.2f ms\n",
      row.name, row.B, row.H, row.S, row.D, us, flops * pairs / us * 1e-6, flops * tiles / us * 1e-6, tiles, build);
  std::fflush(stdout);
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  for (const void* memory : {args.query, args.key, args.value, static_cast<const void*>(args.output)}) {
    CHECK_CUDA(cudaFree(const_cast<void*>(memory)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Row& row : kRows) {
    if (argc < 2 || std::strcmp(argv[1], row.name) == 0) Measure(row);
  }
  return 0;
}
