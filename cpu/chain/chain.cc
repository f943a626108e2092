// SPDX-License-Identifier: Apache-2.0
// Runs the programs of chain_compile.cc: hands rows out to workers.
#include "cpu/chain/chain.h"

#include <algorithm>
#include <atomic>

#include "cpu/chain/elements.h"
#include "cpu/chain/row_offsets.h"
#include "cpu/chain/worker.h"

namespace stof {
namespace cpu {

const ChainKernels& ChainKernelsOf(CpuIsa isa) {
#if defined(__x86_64__)
  if (isa == CpuIsa::kAvx512) return avx512::kChainKernels;
  if (isa == CpuIsa::kAvx2) return avx2::kChainKernels;
#endif
  (void)isa;
  return portable::kChainKernels;
}

namespace {

constexpr double kWorthAThread = 60e3;  // simple operations: some 10 us

int64_t PiecesOf(const ChainProgram& p) {
  if (p.columns) return p.bound.rows * ((p.bound.n + kColumns - 1) / kColumns);
  return p.bound.rows / p.run * BatchesOfRun(p);
}

size_t WorkerBytes(const ChainProgram& p) {
  const size_t bytes = PointerBytes(p) + SumBytes(p) + PlaceBytes(p) + static_cast<size_t>(p.floats) * 4;
  return (bytes + 127) / 64 * 64;
}

int WorkersOf(const ChainProgram& p, int threads) {
  const double work = p.cost * static_cast<double>(p.bound.rows) * static_cast<double>(std::max<int64_t>(1, p.bound.n));
  const auto worth = static_cast<int64_t>(std::min(work / kWorthAThread, 1e6)) + 1;
  return static_cast<int>(std::max<int64_t>(1, std::min({static_cast<int64_t>(threads), worth, PiecesOf(p)})));
}

}  // namespace

size_t ChainWorkspace(const ChainProgram& program, int threads) {
  return WorkerBytes(program) * static_cast<size_t>(WorkersOf(program, threads));
}

void RunChain(const ChainProgram& program, CpuIsa isa, const void* const* inputs, void* const* outputs, void* workspace,
              const Parallel& parallel) {
  Job job{};
  job.program = &program;
  job.kernels = &ChainKernelsOf(isa);
  job.inputs = inputs;
  job.outputs = outputs;
  job.workspace = static_cast<char*>(workspace);
  job.workspace_each = WorkerBytes(program);
  job.pieces = PiecesOf(program);
  const int workers = WorkersOf(program, parallel.threads);
  // Some turns for each worker, so that none waits for a slow one.
  job.pieces_each = std::max<int64_t>(1, job.pieces / (workers == 1 ? 1 : 8 * workers));
  const auto work = [](void* user, size_t i) {
    auto* own = static_cast<Job*>(user);
    Worker(own, own->workspace + i * own->workspace_each).Work();
  };
  if (workers == 1) {
    work(&job, 0);
  } else {
    parallel.run(parallel.self, work, static_cast<size_t>(workers), &job);
  }
}

}  // namespace cpu
}  // namespace stof
