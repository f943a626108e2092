// SPDX-License-Identifier: Apache-2.0
// What the core asks of a build with CUDA kernels. Plain C++: no CUDA header.
#ifndef STOF_PLUGINS_CORE_CUDA_BACKEND_H_
#define STOF_PLUGINS_CORE_CUDA_BACKEND_H_

#include "plugins/core/ops/attention.h"

namespace stof {

struct CudaBackend {
  // Copies to host memory and waits for it: for constants, when an operator is prepared.
  Status (*to_host)(const void* from, size_t bytes, void* to);
  // The device that the calling thread works on.
  Status (*device)(int* id);
  // Queues one attention on context.stream; all pointers of args and pad are device addresses. pad: [B or 1, T] or
  // nullptr.
  Status (*attention)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                      const RunContext& context);
  // How many choices RunContext::kernel has for this problem on the current device; 0: none.
  int (*kernels)(const AttentionArgs& args);
  // Makes the block mask that `attention` would make in its first run with these sizes, on a stream of its own.
  Status (*ready)(const AttentionArgs& args, const AttentionMask& mask, const ExprSizes& sizes, int kernel);
};

// Of a problem without data, also in a build without CUDA kernels: why none of them takes it, or how many bytes one
// asks RunContext::allocate for at most (blocks rounded up to 64). pad: there is padding.
Status CheckCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, size_t* workspace);

// nullptr in a build without CUDA kernels. Needs neither a GPU nor a driver.
const CudaBackend* FindCudaBackend();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CUDA_BACKEND_H_
