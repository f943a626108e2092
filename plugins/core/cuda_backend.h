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
  // Queues one attention on context.stream; all pointers of args, pad and operands are device addresses. pad: [B or 1,
  // T] or nullptr. operands: by role, the vectors and tables that the mask reads; tables may be left out where the mask
  // reads no vector of the run.
  Status (*attention)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                      const Tables& operands, const RunContext& context);
};

// nullptr in a build without CUDA kernels. Needs neither a GPU nor a driver.
const CudaBackend* FindCudaBackend();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CUDA_BACKEND_H_
