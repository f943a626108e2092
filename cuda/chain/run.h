// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_CHAIN_RUN_H_
#define STOF_CUDA_CHAIN_RUN_H_

#include <memory>

#include "plugins/core/contract/cuda_backend.h"

namespace stof {
namespace cuda {

std::unique_ptr<DeviceChain> MakeDeviceChain();
// Queues a chain on context.stream; inputs and outputs are device addresses by number.
Status RunChain(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                DeviceChain* kept, const RunContext& context);
// Makes the kernel that a run would make, for tensors that are aligned as allocations are.
Status ReadyChain(const Chain& chain, const BoundChain& bound, DeviceChain* kept);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_RUN_H_
