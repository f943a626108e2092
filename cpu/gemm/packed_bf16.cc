// SPDX-License-Identifier: Apache-2.0
// Runs GEMMs with factors in bf16: rows are rounded in parallel, then panels are parallel tasks.
#include "cpu/gemm/packed_bf16.h"

#include <algorithm>

#include "cpu/isa_of_kernels.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/base/parallel_for.h"

namespace stof {
namespace {

constexpr double kTaskOperations = 2e6;     // some 2 us by tile registers
constexpr int64_t kTaskElements = 1 << 15;  // to round, as long
constexpr int64_t kTasksPerThread = 4;      // so that threads end at about the same time

// Bytes of the rounded rows.
int64_t CountRounded(int64_t M, int64_t K) {
  return RoundUp(std::min(RoundUp(M, cpu::kBf16SumRows), cpu::kBf16Rows) * RoundUp(K, cpu::kBf16DepthUnit) * 2, 64);
}

}  // namespace

std::optional<CpuIsa> IsaOfBf16Gemm(CpuIsa isa) {
  return cpu::FindIsaOfKernels(isa, &cpu::KernelTable::packed_gemm_bf16);
}

size_t CpuBf16GemmWorkspace(int threads, int64_t M, int64_t K) {
  const int64_t sums = std::clamp<int64_t>(threads, 1, kMostTasks) * cpu::kBf16Floats * 4;
  return static_cast<size_t>(CountRounded(M, K) + sums);
}

namespace cpu {

void RunPackedBf16(const CpuPackedGemmArgs& args, const CpuPackedWeights& weights, void* workspace,
                   const Parallel& parallel) {
  const PackedGemmBf16Kernels& kernels = *KernelsOf(weights.isa()).packed_gemm_bf16;
  const int64_t K = weights.K(), depth = RoundUp(K, kernels.depth), panels = CeilDiv(weights.N(), kernels.columns);
  auto* const rounded = static_cast<uint16_t*>(workspace);
  auto* const sums = reinterpret_cast<float*>(static_cast<char*>(workspace) + CountRounded(args.M, K));
  PackedGemmBf16Problem problem;
  problem.args = &args;
  problem.panels = static_cast<const uint16_t*>(weights.panels());
  problem.rounded = rounded;
  problem.N = weights.N(), problem.K = K, problem.products = weights.count();
  const DType dtype = args.narrow.dtype;
  const auto* const a =
      static_cast<const char*>(dtype == DType::kF32 ? static_cast<const void*>(args.a) : args.narrow.a);
  for (int64_t first = 0; first < args.M; first += kBf16Rows) {
    const int64_t rows = std::min(kBf16Rows, args.M - first);
    problem.first = first;
    const int64_t unit = kBf16SumRows;  // a multiple of every set's
    ParallelFor(parallel, CeilDiv(rows, unit), CeilDiv(rows * K, kTaskElements), [&](int64_t i, int64_t) {
      const int64_t m = i * unit, count = std::min(unit, rows - m);
      kernels.round(a + (first + m) * K * SizeOf(dtype), dtype, K, count, RoundUp(count, kernels.rows),
                    rounded + m * depth);
    });
    const double work =
        2.0 * static_cast<double>(rows) * static_cast<double>(weights.N() * weights.count()) * static_cast<double>(K);
    const int64_t tasks = CountTasks(parallel, rows * panels, static_cast<int64_t>(work / kTaskOperations) + 1);
    // A panel's rows in as few blocks as keep all threads busy: each block reads the panel anew.
    int64_t block = RoundUp(rows, unit);
    while (tasks > 1 && block > kBf16FewestTaskRows && CeilDiv(rows, block) * panels < kTasksPerThread * tasks) {
      block = RoundUp(block / 2, unit);
    }
    const int64_t blocks = CeilDiv(rows, block);
    ParallelFor(parallel, blocks * panels, tasks, [&](int64_t i, int64_t task) {
      const int64_t m = i / panels * block;
      kernels.run(problem, m, std::min(block, rows - m), i % panels, sums + task * kBf16Floats);
    });
  }
}

}  // namespace cpu
}  // namespace stof
