// SPDX-License-Identifier: Apache-2.0
#include "cpu/gemm/gemm.h"

#include <algorithm>
#include <atomic>

#include "cpu/kernel_table.h"
#include "plugins/core/contract/gemm.h"

namespace stof {
namespace {

struct Job {
  const CpuGemmArgs* args;
  const cpu::GemmKernels* kernels;
  float* workspace;
  int64_t columns, blocks;
  std::atomic<int64_t> next{0};
};

}  // namespace

size_t CpuGemmWorkspace(int threads) {
  return static_cast<size_t>(std::max(1, threads)) * cpu::kGemmFloats * sizeof(float);
}

void CpuGemm(const CpuGemmArgs& args, CpuIsa isa, void* workspace, const Parallel& parallel) {
  Job job;
  job.args = &args;
  job.kernels = cpu::KernelsOf(isa).gemm;
  job.workspace = static_cast<float*>(workspace);
  job.columns = (args.N + cpu::kGemmBlockColumns - 1) / cpu::kGemmBlockColumns;
  job.blocks = job.columns * ((args.M + cpu::kGemmBlockRows - 1) / cpu::kGemmBlockRows);
  // A worker takes blocks until none is left; its number says which workspace is its own.
  const auto work = [](void* user, size_t worker) {
    auto* const j = static_cast<Job*>(user);
    float* const own = j->workspace + static_cast<int64_t>(worker) * cpu::kGemmFloats;
    for (int64_t i = j->next.fetch_add(1); i < j->blocks; i = j->next.fetch_add(1)) {
      j->kernels->block(*j->args, i / j->columns * cpu::kGemmBlockRows, i % j->columns * cpu::kGemmBlockColumns, own);
    }
  };
  const int64_t workers = std::min<int64_t>(std::max(1, parallel.threads), job.blocks);
  if (workers <= 1 || parallel.run == nullptr) return work(&job, 0);
  parallel.run(parallel.self, work, static_cast<size_t>(workers), &job);
}

}  // namespace stof
