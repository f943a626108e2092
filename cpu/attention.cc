// SPDX-License-Identifier: Apache-2.0
// Chooses the instruction set and the tile, lays out the workspace and shares the work out among threads.
#include "cpu/attention.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

namespace stof {
namespace {

constexpr int64_t kLine = 64;

int64_t RoundUp(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

bool Supports(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
  if (isa == CpuIsa::kAvx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  }
#endif
  return isa == CpuIsa::kPortable;
}

CpuIsa DetectIsa() {
  static constexpr const char* kNames[] = {"portable", "avx2", "avx512"};
  int best = 2;
  if (const char* wanted = std::getenv("STOF_CPU_ISA")) {
    for (int i = 0; i < 3; ++i) {
      if (std::strcmp(wanted, kNames[i]) == 0) best = i;
    }
  }
  while (best > 0 && !Supports(static_cast<CpuIsa>(best))) --best;
  return static_cast<CpuIsa>(best);
}

const cpu::Kernels& KernelsOf(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) return cpu::avx512::kKernels;
  if (isa == CpuIsa::kAvx2) return cpu::avx2::kKernels;
#endif
  (void)isa;
  return cpu::portable::kKernels;
}

cpu::Problem MakeProblem(const AttentionArgs& args, const CpuAttentionConfig& config) {
  cpu::Problem problem;
  problem.args = &args;
  problem.m = config.m;
  problem.n = config.n;
  problem.tile_rows = (args.S + config.m - 1) / config.m;
  problem.key_tiles = (args.T + config.n - 1) / config.n;
  problem.panels = (args.T + cpu::kPanel - 1) / cpu::kPanel;
  return problem;
}

struct Layout {
  int64_t keys = 0, pad = 0, order = 0, scratch = 0, total = 0;  // byte offsets
  int64_t scratch_each = 0;
};

Layout MakeLayout(const cpu::Problem& problem, const cpu::Kernels& kernels, int threads) {
  const AttentionArgs& a = *problem.args;
  Layout layout;
  int64_t at = RoundUp(a.B * a.G * problem.panels * a.D * cpu::kPanel * 4, kLine);
  layout.pad = at;
  if (a.pad != nullptr) at += RoundUp(a.B * problem.key_tiles * problem.n / 8, kLine);
  layout.order = at;
  at += RoundUp(a.B * a.H * problem.tile_rows * 8, kLine);
  layout.scratch = at;
  layout.scratch_each = RoundUp(static_cast<int64_t>(kernels.scratch_bytes(problem)), kLine);
  layout.total = at + layout.scratch_each * threads;
  return layout;
}

void FillPadBits(const cpu::Problem& problem, uint32_t* bits) {
  const AttentionArgs& a = *problem.args;
  const int64_t words = problem.key_tiles * problem.n / 32;
  std::fill(bits, bits + a.B * words, 0u);
  for (int64_t b = 0; b < a.B; ++b) {
    for (int64_t k = 0; k < a.T; ++k) {
      bits[b * words + k / 32] |= static_cast<uint32_t>(a.pad[b * a.T + k] != 0) << (k % 32);
    }
  }
}

// Items by falling number of tiles, so that the longest do not start last.
void SortItems(const cpu::Problem& problem, int64_t* order) {
  const AttentionArgs& a = *problem.args;
  const int64_t count = a.B * a.H * problem.tile_rows;
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  if (a.mask == nullptr) return;
  const BlockMask& mask = *a.mask;
  const auto cost = [&](int64_t item) {
    const int64_t h = item / problem.tile_rows % a.H;
    const int64_t b = item / problem.tile_rows / a.H;
    const int64_t row = int64_t{mask.TableOf(b, h)} * mask.rows + item % problem.tile_rows;
    return mask.row_ptr[row + 1] - mask.row_ptr[row];
  };
  std::stable_sort(order, order + count, [&](int64_t x, int64_t y) { return cost(x) > cost(y); });
}

struct Job {
  const cpu::Problem* problem;
  const cpu::Kernels* kernels;
  char* scratch;
  int64_t scratch_each;
  const int64_t* order;
  int64_t count;
  int64_t step;
  std::atomic<int64_t> next{0};
};

void PackSome(void* user, size_t worker) {
  Job& job = *static_cast<Job*>(user);
  char* scratch = job.scratch + static_cast<int64_t>(worker) * job.scratch_each;
  for (;;) {
    const int64_t first = job.next.fetch_add(job.step, std::memory_order_relaxed);
    if (first >= job.count) return;
    job.kernels->pack(*job.problem, first, std::min(job.count, first + job.step), scratch);
  }
}

void AttendSome(void* user, size_t worker) {
  Job& job = *static_cast<Job*>(user);
  char* scratch = job.scratch + static_cast<int64_t>(worker) * job.scratch_each;
  for (;;) {
    const int64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= job.count) return;
    job.kernels->tile_row(*job.problem, job.order[i], scratch);
  }
}

}  // namespace

CpuIsa BestCpuIsa() {
  static const CpuIsa isa = DetectIsa();
  return isa;
}

CpuAttentionConfig ChooseCpuAttention(const AttentionArgs& args, int threads) {
  CpuAttentionConfig config;
  config.isa = BestCpuIsa();
  config.n = 64;
  // Whole strips. Fewer rows where there would not be a few items for each thread.
  config.m = 96;
  while (config.m > 24 && args.B * args.H * ((args.S + config.m - 1) / config.m) < 4 * int64_t{threads}) config.m /= 2;
  return config;
}

size_t CpuAttentionWorkspace(const AttentionArgs& args, const CpuAttentionConfig& config, int threads) {
  return static_cast<size_t>(MakeLayout(MakeProblem(args, config), KernelsOf(config.isa), threads).total);
}

Status CpuAttention(const AttentionArgs& args, const CpuAttentionConfig& config, void* workspace,
                    const Parallel& parallel) {
  if (args.mask != nullptr && (args.mask->m != config.m || args.mask->n != config.n || args.mask->S != args.S ||
                               args.mask->T != args.T)) {
    return Status::Error("the block mask was built for another tile or other sizes");
  }
  if (!Supports(config.isa)) return Status::Error("this machine lacks the instruction set of the config");
  const int threads = std::max(1, parallel.threads);
  const cpu::Kernels& kernels = KernelsOf(config.isa);
  cpu::Problem problem = MakeProblem(args, config);
  const Layout layout = MakeLayout(problem, kernels, threads);
  auto* base = static_cast<char*>(workspace);
  problem.packed_keys = reinterpret_cast<float*>(base + layout.keys);
  if (args.pad != nullptr) {
    auto* bits = reinterpret_cast<uint32_t*>(base + layout.pad);
    FillPadBits(problem, bits);
    problem.pad_bits = bits;
  }
  auto* order = reinterpret_cast<int64_t*>(base + layout.order);
  SortItems(problem, order);

  Job pack;
  pack.problem = &problem;
  pack.kernels = &kernels;
  pack.scratch = base + layout.scratch;
  pack.scratch_each = layout.scratch_each;
  pack.order = nullptr;
  pack.count = args.B * args.G * problem.panels;
  pack.step = std::max<int64_t>(1, std::min<int64_t>(16, pack.count / (4 * int64_t{threads})));
  parallel.run(parallel.self, PackSome, static_cast<size_t>(threads), &pack);

  Job attend;
  attend.problem = &problem;
  attend.kernels = &kernels;
  attend.scratch = pack.scratch;
  attend.scratch_each = pack.scratch_each;
  attend.order = order;
  attend.count = args.B * args.H * problem.tile_rows;
  attend.step = 1;
  parallel.run(parallel.self, AttendSome, static_cast<size_t>(threads), &attend);
  return Status();
}

}  // namespace stof
