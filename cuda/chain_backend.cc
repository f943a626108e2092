// SPDX-License-Identifier: Apache-2.0
// From the operator to the kernels of chains.
#include "cuda/chain_backend.h"

#include <cuda_runtime.h>

#include "cuda/chain.h"
#include "cuda/device_mask.h"

namespace stof {
namespace cuda {

Status RunChain(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                const RunContext& context) {
  int device = 0, multiprocessors = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "device"));
  ChainParams params;
  if (!MakeChainParams(chain, bound, inputs, outputs, multiprocessors, &params)) {
    return Status::Error("the chain has more than " + std::to_string(kChainReads) + " reads, or more than " +
                         std::to_string(kChainParts) +
                         " remainders and quotients in indices, which no CUDA kernel takes");
  }
  return ToStatus(static_cast<cudaError_t>(LaunchChain(params, context.stream)), "launch of the kernel of a chain");
}

}  // namespace cuda
}  // namespace stof
