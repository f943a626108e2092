// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_CHAIN_BACKEND_H_
#define STOF_CUDA_CHAIN_BACKEND_H_

#include "plugins/core/chain.h"
#include "plugins/core/op.h"

namespace stof {
namespace cuda {

// Queues a chain on context.stream; inputs and outputs are device addresses by number.
Status RunChain(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                const RunContext& context);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHAIN_BACKEND_H_
