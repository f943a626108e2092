// SPDX-License-Identifier: Apache-2.0
// Packs constant factors, and hands the panels of a product out to workers.
#include "cpu/gemm/packed.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <new>

namespace stof {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{1} << 21;
constexpr int64_t kMostWorkers = 64;
constexpr double kWorthAWorker = 4e5;  // operations: some 5 us

const cpu::PackedKernels& KernelsOf(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) return cpu::avx512::kPackedKernels;
  if (isa == CpuIsa::kAvx2) return cpu::avx2::kPackedKernels;
#endif
  (void)isa;
  return cpu::portable::kPackedKernels;
}

// A worker's own part of all blocks, in their order: what it reads ahead is its own, and its rows of a stay in its
// cache. Who is done takes from the others.
struct alignas(kAlignment) Share {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

struct Job {
  const cpu::PackedProblem* problem;
  const cpu::PackedKernels* kernels;
  float* workspace;
  int64_t panels, workers;
  Share shares[kMostWorkers];
};

void Work(void* user, size_t worker) {
  auto* const job = static_cast<Job*>(user);
  float* const own = job->workspace + static_cast<int64_t>(worker) * cpu::kPackedFloats;
  for (int64_t w = 0; w < job->workers; ++w) {
    Share& share = job->shares[(static_cast<int64_t>(worker) + w) % job->workers];
    for (int64_t i = share.next.fetch_add(1); i < share.end; i = share.next.fetch_add(1)) {
      job->kernels->run(*job->problem, i / job->panels * job->problem->block, i % job->panels, own);
    }
  }
}

}  // namespace

void CpuGemmFactor::Free::operator()(float* panels) const { ::operator delete[](panels, std::align_val_t(kHugePage)); }

bool CpuGemmFactor::Pack(CpuIsa isa, const float* b0, const float* b1, int64_t stride, int64_t N, int64_t K) {
  panels_.reset();
  const cpu::PackedKernels& kernels = KernelsOf(isa);
  const int64_t padded = (N + kernels.vector - 1) / kernels.vector * kernels.vector;
  // A narrow factor would be mostly zeros.
  if (N <= 0 || K <= 0 || padded > 2 * N) return false;
  const int64_t products = b1 != nullptr ? 2 : 1;
  const auto bytes = static_cast<size_t>(padded * products * K) * sizeof(float);
  void* const memory = ::operator new[](bytes, std::align_val_t(kHugePage), std::nothrow);
  if (memory == nullptr) return false;
  panels_.reset(static_cast<float*>(memory));
#if defined(__linux__)
  // Weights come from memory in every run, and a table of pages of 4 KiB for all of them fits no cache.
  (void)madvise(memory, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  float* to = panels_.get();
  for (int64_t n = 0; n < N; n += kernels.columns) {
    const int64_t wide = std::min(kernels.columns, N - n), width = std::min(kernels.columns, padded - n);
    for (const float* b : {b0, b1}) {
      if (b == nullptr) continue;
      kernels.pack(b + n, stride, K, wide, to);
      to += K * width;
    }
  }
  isa_ = isa, N_ = N, K_ = K, products_ = products;
  return true;
}

size_t CpuGemmFactor::Workspace(int threads) {
  return static_cast<size_t>(std::clamp<int64_t>(threads, 1, kMostWorkers) * cpu::kPackedFloats) * sizeof(float);
}

void CpuGemmFactor::Run(const CpuGemmArgs& args, void* workspace, const Parallel& parallel) const {
  const cpu::PackedKernels& kernels = KernelsOf(isa_);
  cpu::PackedProblem problem;
  problem.args = &args;
  problem.panels = panels_.get();
  problem.N = N_, problem.K = K_, problem.products = products_;
  // Blocks of as many rows each, in whole tiles.
  int64_t blocks = (args.M + cpu::kPackedRows - 1) / cpu::kPackedRows;
  const int64_t even = (args.M + blocks - 1) / blocks;
  problem.block = std::min(cpu::kPackedRows, (even + kernels.rows - 1) / kernels.rows * kernels.rows);
  blocks = (args.M + problem.block - 1) / problem.block;
  Job job;
  job.problem = &problem;
  job.kernels = &kernels;
  job.workspace = static_cast<float*>(workspace);
  job.panels = (N_ + kernels.columns - 1) / kernels.columns;
  const int64_t count = blocks * job.panels;
  const double work = 2.0 * static_cast<double>(args.M) * static_cast<double>(N_ * products_) * static_cast<double>(K_);
  const auto worth = static_cast<int64_t>(std::min(work / kWorthAWorker, 1e6)) + 1;
  job.workers = std::min({std::clamp<int64_t>(parallel.threads, 1, kMostWorkers), worth, count});
  if (parallel.run == nullptr) job.workers = 1;
  for (int64_t w = 0; w < job.workers; ++w) {
    job.shares[w].next = count * w / job.workers;
    job.shares[w].end = count * (w + 1) / job.workers;
  }
  if (job.workers == 1) return Work(&job, 0);
  parallel.run(parallel.self, Work, static_cast<size_t>(job.workers), &job);
}

}  // namespace stof
