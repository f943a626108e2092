// SPDX-License-Identifier: Apache-2.0
// Choose blocks: inputs of which a stated share of key blocks stands out for each query block. Calls in a captured
// graph, timed with events. B 1, 32 heads on 8.
//
// bench_cuda_choose_blocks [fp16 | bf16] [--dense] [--head-size D]... [--length S]...
//   --dense      without a mask, too; else causal alone
//   --head-size  128 where none is given
//   --length     4096, 16384, 32768 and 131072 where none is given
// A line: microseconds without a threshold, by the library's choice; of the estimates alone, which is the same graph
// without its last kernel, and what share of the former that is; with a threshold; the ratio; and the share of pairs
// that was counted as kept. All are timed in turns on a warm device: what runs first would have a higher clock.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "cuda/bench/bench_graph.h"
#include "cuda/bench/bench_inputs.h"
#include "plugins/core/contract/chosen_blocks.h"
#include "plugins/core/contract/cuda_backend.h"
#include "plugins/core/mask/attention_mask.h"

namespace {

constexpr int64_t kHeads = 32, kKeyHeads = 8;
constexpr double kDistance = 4;  // -ln of the threshold

struct Arena {
  char* memory = nullptr;
  size_t bytes = 0, used = 0;
};

struct Problem {
  stof::AttentionArgs args;
  std::shared_ptr<const stof::AttentionMask> mask;
  stof::ExprSizes sizes;
  mutable Arena arena;
};

void Queue(const Problem& problem, cudaStream_t stream) {
  stof::RunContext context;
  context.on_cuda = true;
  context.stream = stream;
  context.self = &problem.arena;
  problem.arena.used = 0;
  context.allocate = [](void* self, size_t bytes) -> void* {
    auto& arena = *static_cast<Arena*>(self);
    if (arena.used + bytes > arena.bytes) return nullptr;
    char* const block = arena.memory + arena.used;
    arena.used += (bytes + 255) / 256 * 256;
    return block;
  };
  ExitUnlessOk(
      stof::FindCudaBackend()->attention.run(problem.args, nullptr, *problem.mask, problem.sizes, {}, context));
}

// The node that the stream's capture has queued last.
cudaGraphNode_t LastNode(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaGraphNode_t* nodes = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  CHECK_CUDA(cudaStreamGetCaptureInfo(stream, &status, nullptr, nullptr, &nodes, nullptr, &count));
#else
  const cudaGraphEdgeData* edges = nullptr;
  CHECK_CUDA(cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, nullptr, &nodes, &edges, &count));
#endif
  if (count != 1) {
    std::fprintf(stderr, "the capture has %zu last nodes\n", count);
    std::exit(1);
  }
  return nodes[0];
}

// Microseconds of a call in a graph, without its last kernel where so asked.
double Time(const Problem& problem, bool without_last = false) {
  cudaStream_t stream = nullptr;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto run = [&] { Queue(problem, stream); };
  const auto end_capture = [without_last](cudaStream_t captured) {
    const cudaGraphNode_t last = LastNode(captured);
    const cudaGraph_t graph = EndCapture(captured);
    if (without_last) CHECK_CUDA(cudaGraphDestroyNode(last));
    return graph;
  };
  double us = TimeGraph(stream, 1, run, 8, end_capture);
  us = TimeGraph(stream, 1, run, static_cast<int>(std::clamp(4e5 / us, 8.0, 2000.0)), end_capture);
  CHECK_CUDA(cudaStreamDestroy(stream));
  return us;
}

double KeptShare(const Problem& problem) {
  const stof::AttentionBackend& backend = stof::FindCudaBackend()->attention;
  stof::SkipCounts counts;
  backend.reset_skip_counts();
  Queue(problem, nullptr);
  backend.add_skip_counts(&counts);
  return 1 - static_cast<double>(counts.skipped) / static_cast<double>(std::max<uint64_t>(counts.scored, 1));
}

void Measure(stof::DType dtype, int64_t S, int64_t D, const char* mask) {
  Problem problem;
  ExitUnlessOk(stof::MakeAttentionMask(mask, {}, &problem.mask));
  problem.sizes = {1, kHeads, S, S, 0};
  stof::AttentionArgs& args = problem.args;
  args.shape = {1, kHeads, kKeyHeads, S, S, D, D, dtype};
  args.query.stride = args.output.stride = {kHeads * S * D, S * D, D};
  args.key.stride = args.value.stride = {kKeyHeads * S * D, S * D, D};
  args.scores.scale = 1 / std::sqrt(static_cast<float>(D));
  args.query.data = MakeRows(dtype, kHeads * S, D, QueryLevels(kHeads, S, stof::kBlockQueries), 1);
  args.value.data = MakeRows(dtype, kKeyHeads * S, D, {}, 3);
  args.output.data = MakeRows(dtype, kHeads * S, D, {}, 4);
  const auto threshold = static_cast<float>(std::exp(-kDistance));
  args.scores.block_threshold = threshold;
  ExitUnlessOk(stof::PlanCudaAttention(args, false, *problem.mask, problem.sizes, {}, &problem.arena.bytes));
  problem.arena.bytes += 1 << 20;
  CHECK_CUDA(cudaMalloc(&problem.arena.memory, problem.arena.bytes));
  const double low = -(kDistance + 4) / (static_cast<double>(args.scores.scale) * kReach);
  for (const double share : {0.1, 0.25, 0.5, 1.0}) {
    const auto is_low = [share](double drawn, int64_t) { return drawn >= share; };
    const std::vector<double> levels = KeyLevels(kKeyHeads * S, stof::kBlockKeys, low, is_low);
    args.key.data = MakeRows(dtype, kKeyHeads * S, D, levels, 2);
    const auto dense = [&] { return args.scores.block_threshold = 0, Time(problem); };
    const auto choosing = [&] { return args.scores.block_threshold = threshold, Time(problem); };
    dense();  // warms up
    const double first = dense(), second = choosing(), estimates = Time(problem, true), third = choosing(),
                 fourth = dense();
    const double before = (first + fourth) / 2, us = (second + third) / 2;
    args.scores.block_threshold = threshold;
    const double kept = KeptShare(problem);
    std::printf(
        "%-7s S%-6ld D%-4ld share %.2f  %10.1f us  estimates %8.1f us %5.2f %%  choosing %10.1f us  "
        "ratio %.3f  kept %.3f\n",
        mask[0] == '\0' ? "dense" : "causal", S, D, share, before, estimates, 100 * estimates / before, us, before / us,
        kept);
    std::fflush(stdout);
    CHECK_CUDA(cudaFree(const_cast<void*>(args.key.data)));
  }
  for (const void* memory : {args.query.data, args.value.data, static_cast<const void*>(args.output.data),
                             static_cast<const void*>(problem.arena.memory)}) {
    CHECK_CUDA(cudaFree(const_cast<void*>(memory)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  stof::DType dtype = stof::DType::kF16;
  std::vector<const char*> masks = {"k <= q"};
  std::vector<int64_t> lengths, sizes;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const int64_t number = i + 1 < argc ? std::atoll(argv[i + 1]) : 0;
    if (word == "fp16" || word == "bf16") {
      dtype = word == "fp16" ? stof::DType::kF16 : stof::DType::kBF16;
    } else if (word == "--dense") {
      masks.push_back("");
    } else if (word == "--length" && number >= stof::kBlockKeys) {
      lengths.push_back(number / stof::kBlockKeys * stof::kBlockKeys), ++i;
    } else if (word == "--head-size" && number > 0 && number % 8 == 0) {
      sizes.push_back(number), ++i;
    } else {
      std::fprintf(stderr,
                   "usage: bench_cuda_choose_blocks [fp16 | bf16] [--dense] [--head-size D]... [--length S]...\n");
      return 2;
    }
  }
  if (lengths.empty()) lengths = {4096, 16384, 32768, 131072};
  if (sizes.empty()) sizes = {128};
  for (const int64_t D : sizes) {
    for (const int64_t S : lengths) {
      for (const char* mask : masks) Measure(dtype, S, D, mask);
    }
  }
  return 0;
}
