// SPDX-License-Identifier: Apache-2.0
// The entry points of quantized attention on the CPU: checks, the tile, the workspace, and the threads.
#include "cpu/quantized_attention/quantized_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>

#include "cpu/isa.h"
#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_limits.h"

namespace stof {
namespace {

constexpr int64_t kLine = 64;
static_assert(cpu::kMostQuantizedHeadSize >= AttentionLimits::kLargestHeadSize, "kernels have room for a key");
// Working memory of a worker for scores, roughly: half of a usual L2.
constexpr int64_t kScoreBytes = int64_t{512} << 10;

struct Layout {
  int64_t key_bits = 0, keys = 0, key_sums = 0, values = 0, value_sums = 0, scratch = 0, scratch_each = 0, total = 0;
};

const cpu::QuantizedAttentionKernels& KernelsFor(const CpuQuantizedAttentionConfig& config) {
  return *cpu::KernelsOf(IsaOfQuantizedAttention(config.isa)).quantized_attention;
}

bool KeepsCodes(const QuantizedAttentionArgs& args) {
  return args.attention.scores.bias.data == nullptr &&
         (args.score.given() || args.scaled_score.given() || args.biased_score.given());
}

cpu::QuantizedProblem MakeProblem(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config,
                                  const cpu::QuantizedAttentionKernels& kernels) {
  const AttentionShape& shape = args.attention.shape;
  cpu::QuantizedProblem problem;
  problem.args = &args;
  problem.m = config.m;
  problem.n = config.n;
  problem.tile_rows = CeilDiv(shape.S, config.m);
  problem.key_tiles = CeilDiv(shape.T, config.n);
  problem.key_words = kernels.key_words(shape.D);
  problem.dv_padded = kernels.padded_value_size(shape.Dv);
  problem.keeps_codes = KeepsCodes(args);
  if (const BlockMask* blocks = args.attention.mask.fixed.blocks()) {
    problem.blocks = {blocks->row_ptr.data(), blocks->full_begin.data(), blocks->key_tile.data(),
                      blocks->bits_id.data(), blocks->layout.data(),     blocks->bits.data(),
                      blocks->layout_b,       blocks->layout_h,          blocks->rows};
  }
  return problem;
}

Layout MakeLayout(const cpu::QuantizedProblem& problem, const cpu::QuantizedAttentionKernels& kernels, int threads) {
  const AttentionShape& shape = problem.args->attention.shape;
  Layout layout;
  const auto take = [&layout](int64_t bytes) {
    const int64_t at = layout.total;
    layout.total += RoundUp(bytes, kLine);
    return at;
  };
  const int64_t tiles = shape.B * shape.G * problem.key_tiles;
  if (problem.args->attention.mask.pad != nullptr) layout.key_bits = take(shape.B * problem.key_tiles * 8);
  layout.keys = take(tiles * problem.n * problem.key_words * 4);
  layout.key_sums = take(tiles * problem.n * 4);
  layout.values = take(tiles * problem.n * problem.dv_padded);
  layout.value_sums = take(tiles * problem.dv_padded * 4);
  layout.scratch_each = RoundUp(kernels.scratch_bytes(problem), kLine);
  layout.scratch = take(layout.scratch_each * threads);
  return layout;
}

void FillKeyBits(const cpu::QuantizedProblem& problem) {
  const AttentionShape& shape = problem.args->attention.shape;
  for (int64_t b = 0; b < shape.B; ++b) {
    const uint8_t* pad = problem.args->attention.mask.pad + b * shape.T;
    for (int64_t tile = 0; tile < problem.key_tiles; ++tile) {
      uint64_t word = 0;
      const int64_t first = tile * problem.n, last = std::min(first + problem.n, shape.T);
      for (int64_t k = first; k < last; ++k) word |= uint64_t{pad[k] != 0} << (k - first);
      problem.key_bits[b * problem.key_tiles + tile] = word;
    }
  }
}

// One pass over count items, taken from a counter that all workers share.
struct Job {
  const cpu::QuantizedProblem& problem;
  const cpu::QuantizedAttentionKernels& kernels;
  char* scratch;
  int64_t scratch_each;
  int64_t count = 0;
  void (*work)(Job* job, int64_t item, void* scratch) = nullptr;
  bool prepares = false;
  std::atomic<uint32_t> largest_weight{0};  // bits of floats that are not negative have their order
  std::atomic<int64_t> next{0};
};

void RunWorker(void* user, size_t worker) {
  Job& job = *static_cast<Job*>(user);
  void* scratch = job.scratch + static_cast<int64_t>(worker) * job.scratch_each;
  int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
  if (item < job.count && job.prepares) job.kernels.prepare(job.problem, scratch);
  for (; item < job.count; item = job.next.fetch_add(1, std::memory_order_relaxed)) job.work(&job, item, scratch);
}

void RunAll(Job* job, int64_t count, const Parallel& parallel, void (*work)(Job* job, int64_t item, void* scratch)) {
  job->count = count;
  job->work = work;
  job->next = 0;
  const int64_t workers = std::min<int64_t>(std::max(1, parallel.threads), count);
  if (workers <= 1 || parallel.run == nullptr) {
    if (workers > 0) RunWorker(job, 0);
  } else {
    parallel.run(parallel.self, RunWorker, static_cast<size_t>(workers), job);
  }
}

void Measure(Job* job, int64_t item, void* scratch) {
  const float weight = job->kernels.measure(job->problem, item, scratch);
  uint32_t bits = 0;
  std::memcpy(&bits, &weight, sizeof(bits));
  uint32_t found = job->largest_weight;
  while (found < bits && !job->largest_weight.compare_exchange_weak(found, bits)) {
  }
}

bool IsLegal(const Quantization& q) {
  return q.scale > 0.0f && std::isfinite(q.scale) && q.zero_code() >= 0 && q.zero_code() <= 255;
}

// What the operator has checked already: an error here is a defect of ours.
Status CheckForCpu(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config) {
  const AttentionArgs& attention = args.attention;
  STOF_RETURN_IF_ERROR(Check(attention));
  for (const Quantization* q : {&args.query, &args.key, &args.value, &args.weight}) {
    if (q == &args.weight && args.has_dynamic_weights) continue;
    if (!IsLegal(*q)) return Status::Error("codes of query, key, value or weights have no scale or a wrong zero point");
  }
  for (const Quantization* q : {&args.score, &args.scaled_score, &args.biased_score}) {
    if (q->given() && !IsLegal(*q)) return Status::Error("a rounding of scores has a wrong scale or zero point");
  }
  const ScoreArgs& scores = attention.scores;
  if (!(scores.scale > 0.0f) || scores.softcap != 0.0f || scores.relative_bias.table != nullptr ||
      scores.sink.data != nullptr || scores.has_relative_tables() || attention.relative_value.given() ||
      attention.kv.key_ends != nullptr || attention.kv.pages.given() || attention.kv.columns != nullptr ||
      attention.sequences.given() || attention.output.lse != nullptr || attention.mask.fixed.window() != nullptr) {
    return Status::Error("quantized attention takes a positive scale, a bias and a mask alone");
  }
  if (scores.bias.data != nullptr && scores.bias.dtype != DType::kF32) return Status::Error("the bias is not fp32");
  if (!IsCpuIsaSupported(config.isa)) return Status::Error("this machine lacks the instruction set of the config");
  if (config.n != cpu::kQuantizedTileKeys || config.m < 1 || config.m > cpu::kMostQuantizedRows ||
      config.m % cpu::kQuantizedStrip != 0) {
    return Status::Error("no kernel for tiles of " + std::to_string(config.m) + " x " + std::to_string(config.n) +
                         ", expected multiples of " + std::to_string(cpu::kQuantizedStrip) + " up to " +
                         std::to_string(cpu::kMostQuantizedRows) + " rows x " +
                         std::to_string(cpu::kQuantizedTileKeys) + " keys");
  }
  const BlockMask* const blocks = attention.mask.fixed.blocks();
  if (blocks != nullptr && (blocks->m != config.m || blocks->n != config.n)) {
    return Status::Error("the block mask was built for another tile");
  }
  return Status();
}

}  // namespace

CpuIsa IsaOfQuantizedAttention(CpuIsa isa) {
  // The portable set has kernels: there are some for every set.
  return cpu::FindIsaOfKernels(isa, &cpu::KernelTable::quantized_attention).value_or(CpuIsa::kPortable);
}

CpuQuantizedAttentionConfig ChooseCpuQuantizedAttention(const QuantizedAttentionArgs& args) {
  const int64_t each = (KeepsCodes(args) ? 1 : 5) * std::max<int64_t>(args.attention.shape.T, 1);
  int m = cpu::kMostQuantizedRows;
  while (m > cpu::kQuantizedStrip && (m * each > kScoreBytes || m / 2 >= args.attention.shape.S)) m /= 2;
  return {BestCpuIsa(), m, cpu::kQuantizedTileKeys};
}

size_t CpuQuantizedAttentionWorkspace(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config,
                                      int threads) {
  const cpu::QuantizedAttentionKernels& kernels = KernelsFor(config);
  const cpu::QuantizedProblem problem = MakeProblem(args, config, kernels);
  return static_cast<size_t>(MakeLayout(problem, kernels, std::max(1, threads)).total);
}

Status CpuQuantizedAttention(const QuantizedAttentionArgs& args, const CpuQuantizedAttentionConfig& config,
                             void* workspace, const Parallel& parallel) {
  STOF_RETURN_IF_ERROR(CheckForCpu(args, config));
  const AttentionShape& shape = args.attention.shape;
  if (shape.B == 0 || shape.H == 0 || shape.S == 0) return Status();
  const cpu::QuantizedAttentionKernels& kernels = KernelsFor(config);
  QuantizedAttentionArgs used = args;
  if (args.has_dynamic_weights) used.weight = Quantization{1.0f, 0, false};
  cpu::QuantizedProblem problem = MakeProblem(used, config, kernels);
  const Layout layout = MakeLayout(problem, kernels, std::max(1, parallel.threads));
  char* const base = static_cast<char*>(workspace);
  problem.keys = reinterpret_cast<int8_t*>(base + layout.keys);
  problem.key_sums = reinterpret_cast<int32_t*>(base + layout.key_sums);
  problem.values = reinterpret_cast<int8_t*>(base + layout.values);
  problem.value_sums = reinterpret_cast<int32_t*>(base + layout.value_sums);
  if (args.attention.mask.pad != nullptr) {
    problem.key_bits = reinterpret_cast<uint64_t*>(base + layout.key_bits);
    FillKeyBits(problem);
  }
  Job job{problem, kernels, base + layout.scratch, layout.scratch_each};
  RunAll(&job, shape.B * shape.G, parallel,
         [](Job* all, int64_t item, void*) { all->kernels.pack(all->problem, item); });
  job.prepares = true;
  const int64_t items = shape.B * shape.H * problem.tile_rows;
  if (args.has_dynamic_weights) {
    RunAll(&job, items, parallel, Measure);
    const uint32_t bits = job.largest_weight;
    float largest = 0.0f;
    std::memcpy(&largest, &bits, sizeof(largest));
    // Without a weight all codes are 0, whatever the scale.
    used.weight.scale = largest > 0.0f ? largest / 255.0f : 1.0f;
  }
  // The last rows of a causal mask are the longest: they go first.
  RunAll(&job, items, parallel, [](Job* all, int64_t item, void* scratch) {
    all->kernels.attend(all->problem, all->count - 1 - item, scratch);
  });
  return Status();
}

}  // namespace stof
