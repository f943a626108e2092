// SPDX-License-Identifier: Apache-2.0
// The CUDA attention kernel alone: calls in a captured graph, timed with events, median of replays. Prints useful
// TFLOPS (allowed pairs), TFLOPS on the tiles that the mask keeps, and the build time of the block mask.
//
// bench_cuda_attention [--all] [--only NAME]...: --all times every kernel of the head size, too, and says what the
// selector's model thinks of each and how much slower its choice is than the best.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention_sm90.h"
#include "cuda/selector.h"
#include "plugins/core/block_mask_builder.h"
#include "plugins/core/cuda_backend.h"

namespace {

struct Row {
  const char* name;
  const char* mask;
  int64_t B, H, S, D;
  int launches = 1;  // in one graph; the time is divided by them
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
    {"dense", "", 1, 12, 128, 64, 100},
    {"causal", "k <= q", 1, 12, 128, 64, 100},
    {"dense", "", 1, 12, 512, 64, 100},
    {"causal", "k <= q", 1, 12, 512, 64, 100},
    {"dense", "", 1, 12, 1024, 64, 100},
    {"causal", "k <= q", 1, 12, 1024, 64, 100},
};

#define CHECK_CUDA(call)                                                   \
  do {                                                                     \
    const cudaError_t error_ = (call);                                     \
    if (error_ != cudaSuccess) {                                           \
      std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

// fp16 in (-2, 2): sign, exponents 10 to 15, mantissa. Every problem takes the same memory from its start.
void* RandomHalves(uint32_t seed) {
  constexpr size_t kMost = size_t{1} * 32 * 8192 * 128;
  static std::map<uint32_t, void*> made;
  void*& memory = made[seed];
  if (memory != nullptr) return memory;
  std::vector<uint16_t> values(kMost);
  std::mt19937 random(seed);
  for (size_t i = 0; i < kMost; i += 2) {
    const uint32_t bits = random();
    values[i] = static_cast<uint16_t>((bits & 0x83ffu) | (10u + (bits >> 10) % 6u) << 10);
    values[i + 1] = static_cast<uint16_t>((bits >> 16 & 0x83ffu) | (10u + (bits >> 5 & 0xffu) % 6u) << 10);
  }
  CHECK_CUDA(cudaMalloc(&memory, values.size() * 2));
  CHECK_CUDA(cudaMemcpy(memory, values.data(), values.size() * 2, cudaMemcpyHostToDevice));
  return memory;
}

void* NoMemory(void*, size_t) { return nullptr; }

// Microseconds of one call, by the kernel of that number; -1: the selector's choice.
double Time(const Row& row, const stof::AttentionArgs& args, const stof::AttentionMask& mask,
            const stof::ExprSizes& sizes, int kernel) {
  stof::cuda::TakeKernel(kernel);
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = NoMemory;
  const auto run = [&] {
    const stof::Status status = stof::FindCudaBackend()->attention(args, nullptr, mask, sizes, {}, context);
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
  for (int i = 0; i < row.launches; ++i) run();
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
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  CHECK_CUDA(cudaEventDestroy(begin));
  CHECK_CUDA(cudaEventDestroy(end));
  CHECK_CUDA(cudaStreamDestroy(stream));
  stof::cuda::TakeKernel(-1);
  return 1e3 * static_cast<double>(times[times.size() / 2]) / row.launches;
}

// Every kernel's time beside the model's, and the regret of the choice, which took `chosen`.
void MeasureAll(const Row& row, const stof::AttentionArgs& args, const stof::AttentionMask& mask,
                const stof::ExprSizes& sizes, double chosen) {
  stof::cuda::Problem problem;
  if (!mask.parts.fixed.empty()) problem.mask = &mask.parts.fixed;
  problem.hash = mask.fixed_hash;
  problem.sizes = sizes;
  CHECK_CUDA(cudaDeviceGetAttribute(&problem.multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  int l2 = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, 0));
  problem.section = std::max<int64_t>(1, l2 / 2 / (4 * row.S * row.D));
  const stof::cuda::Sm90Kernel* kernels = stof::cuda::FindSm90(static_cast<int>(row.D), false);
  double best = chosen;
  int at = 0;
  for (const auto* kernel = kernels; kernel->launch != nullptr; ++kernel, ++at) {
    int64_t model = 0;
    const stof::Status status = stof::cuda::Predict(*kernel, problem, &model);
    if (!status.ok()) std::exit(1);
    const double us = Time(row, args, mask, sizes, at);
    best = std::min(best, us);
    std::printf("    kernel %d (%3d x %3d, %d): %9.1f us, model %9.1f\n", at, kernel->rows, kernel->keys,
                kernel->workers, us, static_cast<double>(model) * 1e-3);
  }
  std::printf("    regret %.1f %%\n", 100.0 * (chosen / best - 1.0));
}

void Measure(const Row& row, bool all) {
  stof::AttentionArgs args;
  args.B = row.B, args.H = args.G = row.H, args.S = args.T = row.S, args.D = args.Dv = row.D;
  args.dtype = stof::DType::kF16;
  args.query = RandomHalves(1), args.key = RandomHalves(2), args.value = RandomHalves(3);
  args.output = RandomHalves(4);
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
  if (!status.ok()) {
    std::fprintf(stderr, "%s: %s\n", row.name, status.message().c_str());
    std::exit(1);
  }
  const double us = Time(row, args, *mask, sizes, -1);
  const double flops = 4.0 * static_cast<double>(row.B * row.H * row.S * row.S * row.D);
  std::printf(
      "%-11s B%-2ld H%-2ld S%-5ld D%-3ld %9.1f us  %6.1f useful %6.1f on tiles TFLOPS  tiles %.3f  build %.2f ms\n",
      row.name, row.B, row.H, row.S, row.D, us, flops * pairs / us * 1e-6, flops * tiles / us * 1e-6, tiles, build);
  if (all) MeasureAll(row, args, *mask, sizes, us);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  bool all = false;
  std::vector<std::string> only;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--all") == 0) {
      all = true;
    } else if (std::strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
      only.emplace_back(argv[++i]);
    } else {
      std::fprintf(stderr, "usage: bench_cuda_attention [--all] [--only NAME]...\n");
      return 2;
    }
  }
  for (const Row& row : kRows) {
    if (only.empty() || std::find(only.begin(), only.end(), row.name) != only.end()) Measure(row, all);
  }
  return 0;
}
