// SPDX-License-Identifier: Apache-2.0
// Packs constant weights, and runs the panels of a GEMM as parallel tasks.
#include "cpu/gemm/packed.h"

#include <algorithm>

#include "cpu/gemm/packed_bf16.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/base/parallel_for.h"
#include "plugins/core/host/huge_pages.h"

namespace stof {
namespace {

constexpr double kTaskOperations = 4e5;  // some 5 us

}  // namespace

void CpuPackedWeights::Free::operator()(char* panels) const { FreeHugePages()(panels); }

bool CpuPackedWeights::DoesPay(CpuIsa isa, int64_t N, int64_t K) {
  // Narrow weights would be mostly zeros.
  return N > 0 && K > 0 && RoundUp(N, cpu::KernelsOf(isa).packed_gemm->vector) <= 2 * N;
}

template <typename Kernels, typename T, typename PackPanel>
bool CpuPackedWeights::PackPanels(const Kernels& kernels, const Factors& factors, int64_t depth,
                                  const PackPanel& pack) {
  const int64_t padded = RoundUp(N_, kernels.vector);
  if (!Allocate(padded * count_ * depth * static_cast<int64_t>(sizeof(T)))) return false;
  auto* to = reinterpret_cast<T*>(panels_.get());
  for (int64_t n = 0; n < N_; n += kernels.columns) {
    const int64_t wide = std::min(kernels.columns, N_ - n), width = std::min(kernels.columns, padded - n);
    for (const void* b : {factors.b0, factors.b1}) {
      if (b == nullptr) continue;
      pack(static_cast<const char*>(b) + n * SizeOf(factors.dtype), wide, to);
      to += depth * width;
    }
  }
  return true;
}

bool CpuPackedWeights::PackFactors(CpuIsa isa, bool is_bf16, const Factors& factors, int64_t N, int64_t K) {
  panels_.reset();
  if (!DoesPay(isa, N, K)) return false;
  isa_ = isa, is_bf16_ = is_bf16, N_ = N, K_ = K, count_ = factors.b1 != nullptr ? 2 : 1;
  const cpu::KernelTable& table = cpu::KernelsOf(isa);
  if (!is_bf16) {
    const auto pack = [&](const char* b, int64_t wide, float* to) {
      table.packed_gemm->pack(reinterpret_cast<const float*>(b), factors.stride, K, wide, to);
    };
    return PackPanels<cpu::PackedGemmKernels, float>(*table.packed_gemm, factors, K, pack);
  }
  const cpu::PackedGemmBf16Kernels& kernels = *table.packed_gemm_bf16;
  const auto pack = [&](const char* b, int64_t wide, uint16_t* to) {
    kernels.pack(b, factors.dtype, factors.stride, K, wide, to);
  };
  return PackPanels<cpu::PackedGemmBf16Kernels, uint16_t>(kernels, factors, RoundUp(K, kernels.depth), pack);
}

bool CpuPackedWeights::Pack(CpuIsa isa, bool is_bf16, const float* b0, const float* b1, int64_t stride, int64_t N,
                            int64_t K) {
  return PackFactors(isa, is_bf16, {b0, b1, DType::kF32, stride}, N, K);
}

bool CpuPackedWeights::PackNarrow(CpuIsa isa, DType dtype, const uint16_t* b0, const uint16_t* b1, int64_t stride,
                                  int64_t N, int64_t K) {
  return PackFactors(isa, true, {b0, b1, dtype, stride}, N, K);
}

bool CpuPackedWeights::Allocate(int64_t bytes) {
  panels_.reset(static_cast<char*>(AllocateHugePages(static_cast<size_t>(bytes))));
  return panels_ != nullptr;
}

size_t CpuPackedGemmWorkspace(int threads) {
  return static_cast<size_t>(std::clamp<int64_t>(threads, 1, kMostTasks) * cpu::kPackedFloats) * sizeof(float);
}

void CpuPackedGemm(const CpuPackedGemmArgs& args, const CpuPackedWeights& weights, void* workspace,
                   const Parallel& parallel) {
  if (weights.is_bf16()) return cpu::RunPackedBf16(args, weights, workspace, parallel);
  const cpu::PackedGemmKernels& kernels = *cpu::KernelsOf(weights.isa()).packed_gemm;
  cpu::PackedGemmProblem problem;
  problem.args = &args;
  problem.panels = static_cast<const float*>(weights.panels());
  problem.N = weights.N(), problem.K = weights.K(), problem.products = weights.count();
  // Blocks of as many rows each, in whole tiles.
  int64_t blocks = CeilDiv(args.M, cpu::kPackedRows);
  const int64_t even = CeilDiv(args.M, blocks);
  problem.block = std::min(cpu::kPackedRows, RoundUp(even, kernels.rows));
  blocks = CeilDiv(args.M, problem.block);
  const int64_t panels = CeilDiv(problem.N, kernels.columns);
  const double work = 2.0 * static_cast<double>(args.M) * static_cast<double>(problem.N * problem.products) *
                      static_cast<double>(problem.K);
  const auto tasks = static_cast<int64_t>(std::min(work / kTaskOperations, 1e6)) + 1;
  // A task's own blocks in their order: it prefetches its own panels, and its rows of a stay in its cache.
  ParallelFor(parallel, blocks * panels, tasks, [&](int64_t i, int64_t task) {
    float* const own = static_cast<float*>(workspace) + task * cpu::kPackedFloats;
    kernels.run(problem, i / panels * problem.block, i % panels, own);
  });
}

}  // namespace stof
