// SPDX-License-Identifier: Apache-2.0
// Skip by score: inputs of which a stated share of key tiles can be left out, with a threshold and without one. Calls
// in a captured graph, timed with events. B 1, 32 heads on 8, heads of 128 and 64 elements.
//
// bench_cuda_skip_scores [fp16 | bf16] [--all] [--length S]...
//   --all     times every kernel that skips, too; without it the library's choice alone
//   --length  4096, 16384 and 65536 where none is given
// A line: microseconds without a threshold and with one, their ratio, the share of pairs that was counted as left out.
// Both are timed in turns of 0.4 s on a warm device: what runs first would have a higher clock.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/bench/bench_graph.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"

namespace {

constexpr int64_t kHeads = 32, kKeyHeads = 8;
constexpr int64_t kGroup = 64, kBlock = 128;  // queries that see the same levels, keys that have one
constexpr int kDirections = 4;
constexpr double kReach = 8;
constexpr float kThreshold = 1;

void ExitUnlessOk(const stof::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

uint16_t ToBits(stof::DType dtype, double x) {
  if (dtype == stof::DType::kF16) return __half_as_ushort(__double2half(x));
  return __bfloat16_as_ushort(__double2bfloat16(x));
}

// Random rows [rows, D] on the device, whose first elements are those of `levels` [rows, kDirections].
void* MakeRows(stof::DType dtype, int64_t rows, int64_t D, const std::vector<double>& levels, uint32_t seed) {
  constexpr int64_t kPart = int64_t{1} << 20;  // rows repeat: the host takes its time to draw numbers
  std::mt19937 random(seed);
  std::normal_distribution<double> draw(0, 0.5);
  const int64_t drawn = std::min(rows * D, kPart * 4) / D * D;
  std::vector<uint16_t> values(static_cast<size_t>(drawn));
  for (uint16_t& x : values) x = ToBits(dtype, draw(random));
  char* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, static_cast<size_t>(2 * rows * D)));
  for (int64_t at = 0; at < rows * D; at += drawn) {
    const auto bytes = static_cast<size_t>(2 * std::min(drawn, rows * D - at));
    CHECK_CUDA(cudaMemcpy(memory + 2 * at, values.data(), bytes, cudaMemcpyHostToDevice));
  }
  if (levels.empty()) return memory;
  std::vector<uint16_t> first(levels.size());
  for (size_t i = 0; i < levels.size(); ++i) first[i] = ToBits(dtype, levels[i]);
  constexpr size_t kBytes = 2 * kDirections;
  CHECK_CUDA(cudaMemcpy2D(memory, static_cast<size_t>(2 * D), first.data(), kBytes, kBytes, static_cast<size_t>(rows),
                          cudaMemcpyHostToDevice));
  return memory;
}

// Queries see the levels of keys along one of four directions, by turns. Of a block of keys the given share of levels
// is so low that it can be left out.
std::vector<double> QueryLevels(int64_t S) {
  std::vector<double> levels(static_cast<size_t>(kHeads * S * kDirections), 0.0);
  for (int64_t row = 0; row < kHeads * S; ++row) {
    levels[static_cast<size_t>(row * kDirections + row % S / kGroup % kDirections)] = kReach;
  }
  return levels;
}
std::vector<double> KeyLevels(int64_t T, double low, double share) {
  std::mt19937 random(7);
  std::vector<double> levels(static_cast<size_t>(kKeyHeads * T * kDirections), 0.0);
  for (int64_t block = 0; block < kKeyHeads * T / kBlock; ++block) {
    for (int direction = 0; direction < kDirections; ++direction) {
      const bool is_low = static_cast<double>(random() >> 8) * 0x1p-24 < share && block % (T / kBlock) != 0;
      for (int64_t k = block * kBlock; is_low && k < (block + 1) * kBlock; ++k) {
        levels[static_cast<size_t>(k * kDirections + direction)] = low;
      }
    }
  }
  return levels;
}

struct Problem {
  stof::AttentionArgs args;
  std::shared_ptr<const stof::AttentionMask> mask;
  stof::ExprSizes sizes;
};

void Queue(const Problem& problem, cudaStream_t stream) {
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.allocate = [](void*, size_t) -> void* { return nullptr; };  // these kernels need none
  ExitUnlessOk(
      stof::FindCudaBackend()->attention.run(problem.args, nullptr, *problem.mask, problem.sizes, {}, context));
}

// Microseconds of a call by the named kernel, "": the library's choice.
double Time(const Problem& problem, const std::string& kernel) {
  ExitUnlessOk(stof::cuda::AttentionRequests().Force(kernel));
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto run = [&] { Queue(problem, stream); };
  double us = TimeGraph(stream, 1, run, 8);
  us = TimeGraph(stream, 1, run, static_cast<int>(std::clamp(4e5 / us, 8.0, 2000.0)));
  CHECK_CUDA(cudaStreamDestroy(stream));
  stof::cuda::AttentionRequests().Release();
  return us;
}

// Microseconds without a threshold, by the library's choice, and with one, by the named kernel.
struct Times {
  double plain, skipping;
};
Times Compare(Problem* problem, const std::string& kernel) {
  const auto plain = [&] { return problem->args.scores.skip_threshold = 0, Time(*problem, ""); };
  const auto skipping = [&] { return problem->args.scores.skip_threshold = kThreshold, Time(*problem, kernel); };
  plain();  // warms up
  const double first = plain(), second = skipping(), third = skipping(), fourth = plain();
  return {(first + fourth) / 2, (second + third) / 2};
}

double ShareOf(const Problem& problem, const std::string& kernel) {
  ExitUnlessOk(stof::cuda::AttentionRequests().Force(kernel));
  const stof::AttentionBackend& backend = stof::FindCudaBackend()->attention;
  stof::SkipCounts counts;
  backend.reset_skip_counts();
  Queue(problem, nullptr);
  backend.add_skip_counts(&counts);
  stof::cuda::AttentionRequests().Release();
  return counts.scored == 0 ? 0 : static_cast<double>(counts.skipped) / static_cast<double>(counts.scored);
}

void Measure(stof::DType dtype, int64_t S, int64_t D, const char* mask, bool all) {
  Problem problem;
  ExitUnlessOk(stof::MakeAttentionMask(mask, {}, &problem.mask));
  problem.sizes = {1, kHeads, S, S, 0};
  stof::AttentionArgs& args = problem.args;
  args.shape = {1, kHeads, kKeyHeads, S, S, D, D, dtype};
  args.query.stride = args.output.stride = {kHeads * S * D, S * D, D};
  args.key.stride = args.value.stride = {kKeyHeads * S * D, S * D, D};
  args.scores.scale = 1 / std::sqrt(static_cast<float>(D));
  args.query.data = MakeRows(dtype, kHeads * S, D, QueryLevels(S), 1);
  args.value.data = MakeRows(dtype, kKeyHeads * S, D, {}, 3);
  args.output.data = MakeRows(dtype, kHeads * S, D, {}, 4);
  const double distance = std::log(static_cast<double>(S) / kThreshold);
  const double low = -(distance + 4) / (static_cast<double>(args.scores.scale) * kReach);
  stof::cuda::DeviceProperties device;
  ExitUnlessOk(stof::cuda::GetDeviceProperties(&device));
  stof::cuda::KernelProblem asked;
  asked.capability = device.capability, asked.dtype = dtype, asked.head_size = static_cast<int>(D);
  asked.skips_scores = true;
  stof::cuda::KernelTable kernels;
  stof::cuda::FindFamily(stof::cuda::KernelRole::kScheduled, asked, &kernels);
  for (const double share : {0.0, 0.5, 0.7, 0.9}) {
    args.key.data = MakeRows(dtype, kKeyHeads * S, D, KeyLevels(S, low, share), 2);
    const auto print = [&](const std::string& kernel) {
      const auto [plain, us] = Compare(&problem, kernel);
      args.scores.skip_threshold = kThreshold;
      std::printf("%-8s S%-6ld D%-4ld share %.2f  %10.1f us  skipping %10.1f us  ratio %.3f  counted %.3f  %s\n",
                  mask[0] == '\0' ? "dense" : "causal", S, D, share, plain, us, plain / us, ShareOf(problem, kernel),
                  kernel.c_str());
      std::fflush(stdout);
    };
    print("");
    for (int i = 0; all && i < kernels.size(); ++i) print(stof::cuda::KernelName(kernels[i]));
    CHECK_CUDA(cudaFree(const_cast<void*>(args.key.data)));
  }
  for (const void* memory : {args.query.data, args.value.data, static_cast<const void*>(args.output.data)}) {
    CHECK_CUDA(cudaFree(const_cast<void*>(memory)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  stof::DType dtype = stof::DType::kF16;
  bool all = false;
  std::vector<int64_t> lengths;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "fp16" || word == "bf16") {
      dtype = word == "fp16" ? stof::DType::kF16 : stof::DType::kBF16;
    } else if (word == "--all") {
      all = true;
    } else if (word == "--length" && i + 1 < argc && std::atoll(argv[i + 1]) >= kBlock) {
      lengths.push_back(std::atoll(argv[++i]) / kBlock * kBlock);
    } else {
      std::fprintf(stderr, "usage: bench_cuda_skip_scores [fp16 | bf16] [--all] [--length S]...\n");
      return 2;
    }
  }
  if (lengths.empty()) lengths = {4096, 16384, 65536};
  for (const int64_t D : {128, 64}) {
    for (const int64_t S : lengths) {
      for (const char* mask : {"", "k <= q"}) Measure(dtype, S, D, mask, all);
    }
  }
  return 0;
}
