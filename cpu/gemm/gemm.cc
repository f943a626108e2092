// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/gemm.h"

#include <algorithm>
#include <atomic>

#include "plugins/core/gemm/gemm.h"

namespace stof {
namespace {

cpu::GemmBlockFunction BlockOf(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa != CpuIsa::kPortable) return cpu::avx2::GemmBlock;
#endif
  (void)isa;
  return cpu::portable::GemmBlock;
}

struct Job {
  const cpu::GemmProblem* problem;
  cpu::GemmBlockFunction block;
  float* workspace;
  int64_t columns, blocks;
  std::atomic<int64_t> next{0};
};

}  // namespace

size_t CpuGemmWorkspace(int threads) {
  return static_cast<size_t>(std::max(1, threads)) * cpu::kGemmFloats * sizeof(float);
}

void CpuGemm(CpuIsa isa, DType dtype, const void* a, const void* b, int64_t stride, int64_t M, int64_t N, int64_t K,
             float* product, void* workspace, const Parallel& parallel) {
  cpu::GemmProblem problem;
  problem.M = M, problem.N = N, problem.K = K, problem.stride = stride;
  problem.dtype = dtype;
  problem.a = a, problem.b = b;
  problem.product = product;
  Job job;
  job.problem = &problem;
  job.block = BlockOf(isa);
  job.workspace = static_cast<float*>(workspace);
  job.columns = (N + cpu::kGemmBlockColumns - 1) / cpu::kGemmBlockColumns;
  job.blocks = job.columns * ((M + cpu::kGemmBlockRows - 1) / cpu::kGemmBlockRows);
  // A worker takes blocks until none is left; its number says which workspace is its own.
  const auto work = [](void* user, size_t worker) {
    auto* const j = static_cast<Job*>(user);
    float* const own = j->workspace + static_cast<int64_t>(worker) * cpu::kGemmFloats;
    for (int64_t i = j->next.fetch_add(1); i < j->blocks; i = j->next.fetch_add(1)) {
      j->block(*j->problem, i / j->columns * cpu::kGemmBlockRows, i % j->columns * cpu::kGemmBlockColumns, own);
    }
  };
  const int64_t workers = std::min<int64_t>(std::max(1, parallel.threads), job.blocks);
  if (workers <= 1 || parallel.run == nullptr) return work(&job, 0);
  parallel.run(parallel.self, work, static_cast<size_t>(workers), &job);
}

}  // namespace stof
