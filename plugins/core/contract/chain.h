// SPDX-License-Identifier: Apache-2.0
// Fused chains: the arguments of their kernels, and the entry points of cpu/ and cuda/.
#ifndef STOF_PLUGINS_CORE_CONTRACT_CHAIN_H_
#define STOF_PLUGINS_CORE_CONTRACT_CHAIN_H_

#include <cstddef>
#include <memory>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/chain/chain.h"

namespace stof {

struct RunContext;  // plugins/core/contract/op.h

// Addresses of a chain's data by the number of the input or output.
struct ChainArgs {
  const void* const* inputs = nullptr;
  void* const* outputs = nullptr;
};

// ---- CPU ----
namespace cpu {
struct ChainProgram;  // cpu/chain/chain.h
}
// A chain compiled for the shapes of a run.
std::shared_ptr<const cpu::ChainProgram> CompileCpuChain(const Chain& chain, const BoundChain& bound, CpuIsa isa,
                                                         int threads);
size_t CpuChainWorkspace(const cpu::ChainProgram& program, int threads);
// workspace: CpuChainWorkspace bytes, 64-byte aligned, contents arbitrary.
void CpuChain(const ChainArgs& args, const cpu::ChainProgram& program, void* workspace, const Parallel& parallel);

// ---- CUDA ----
// The backend's state for a chain with the shapes of a run.
class DeviceChain {
 public:
  virtual ~DeviceChain() = default;
};

struct ChainBackend {
  // State for one bound chain, for `prepare` and `run`.
  std::unique_ptr<DeviceChain> (*make_state)() = nullptr;
  // Makes the kernel that a first run would make.
  Status (*prepare)(const Chain& chain, const BoundChain& bound, DeviceChain* state) = nullptr;
  // Queues a chain on context.stream; all data are device addresses. state: of this bound chain alone.
  Status (*run)(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                DeviceChain* state, const RunContext& context) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CHAIN_H_
