// SPDX-License-Identifier: Apache-2.0
// The entry points of fused chains on the CPU: distributes rows among workers.
#include "cpu/chain/chain.h"

#include <algorithm>
#include <atomic>

#include "cpu/chain/chain_worker.h"
#include "cpu/chain/elements.h"
#include "cpu/chain/row_offsets.h"
#include "cpu/kernel_table.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cpu {

namespace {

constexpr double kWorthAThread = 60e3;  // simple operations: some 10 us

int64_t PiecesOf(const ChainProgram& p) {
  if (p.columns) return p.bound.rows * CeilDiv(p.bound.n, kColumns);
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
}  // namespace cpu

std::shared_ptr<const cpu::ChainProgram> CompileCpuChain(const Chain& chain, const BoundChain& bound, CpuIsa isa,
                                                         int threads) {
  auto program = std::make_shared<cpu::ChainProgram>();
  cpu::CompileChain(chain, bound, threads, program.get());
  program->isa = isa;
  return program;
}

size_t CpuChainWorkspace(const cpu::ChainProgram& program, int threads) {
  return cpu::WorkerBytes(program) * static_cast<size_t>(cpu::WorkersOf(program, threads));
}

void CpuChain(const ChainArgs& args, const cpu::ChainProgram& program, void* workspace, const Parallel& parallel) {
  cpu::Job job{};
  job.program = &program;
  job.kernels = cpu::KernelsOf(program.isa).chain;
  job.inputs = args.inputs;
  job.outputs = args.outputs;
  job.workspace = static_cast<char*>(workspace);
  job.workspace_each = cpu::WorkerBytes(program);
  job.pieces = cpu::PiecesOf(program);
  const int workers = cpu::WorkersOf(program, parallel.threads);
  // Several steps for each worker, so that none waits for a slow one.
  job.pieces_each = std::max<int64_t>(1, job.pieces / (workers == 1 ? 1 : 8 * workers));
  const auto work = [](void* user, size_t i) {
    auto* own = static_cast<cpu::Job*>(user);
    cpu::ChainWorker(own, own->workspace + i * own->workspace_each).Work();
  };
  if (workers == 1) {
    work(&job, 0);
  } else {
    parallel.run(parallel.self, work, static_cast<size_t>(workers), &job);
  }
}

}  // namespace stof
