// SPDX-License-Identifier: Apache-2.0
// Skip by score: inputs of which a stated share of key tiles can be left out, with a threshold and without one. Calls
// in a captured graph, timed with events. B 1, 32 heads on 8, heads of 128 and 64 elements.
//
// bench_cuda_skip_scores [fp16 | bf16] [--all] [--length S]...
//   --all     times every kernel that skips, too; without it the library's choice alone
//   --length  4096, 16384 and 65536 where none is given
// A line: microseconds without a threshold and with one, their ratio, the share of pairs that was counted as left out.
// Both are timed in turns of 0.4 s on a warm device: what runs first would have a higher clock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/families.h"
#include "cuda/bench/bench_graph.h"
#include "cuda/bench/bench_inputs.h"
#include "cuda/common/device_properties.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"

namespace {

constexpr int64_t kHeads = 32, kKeyHeads = 8;
constexpr int64_t kGroup = 64, kBlock = 128;  // queries that see the same levels, keys that have one
constexpr float kThreshold = 1;

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
  args.query.data = MakeRows(dtype, kHeads * S, D, QueryLevels(kHeads, S, kGroup), 1);
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
    // Not of the first block: its scores decide which ones are low.
    const auto is_low = [share, S](double drawn, int64_t first) { return drawn < share && first % S != 0; };
    const std::vector<double> levels = KeyLevels(kKeyHeads * S, kBlock, low, is_low);
    args.key.data = MakeRows(dtype, kKeyHeads * S, D, levels, 2);
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
