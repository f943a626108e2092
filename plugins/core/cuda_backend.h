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
  // Memory in the order of a stream: whoever gets it next on any stream has it after what this stream does until it is
  // given back. False where there is no such memory, or the stream is being captured; else *memory, nullptr for none
  // left.
  bool (*take)(void* stream, size_t bytes, void** memory);
  void (*give)(void* stream, void* memory);
  // Whether the stream is being captured; waits for it where it is not.
  bool (*captured_or_done)(void* stream);
  // Calls run(self) with leave to allocate while a stream is being captured.
  void (*relaxed)(void (*run)(void* self), void* self);
  // Queues one attention on context.stream; all pointers of args, pad and operands are device addresses. pad: [B or 1,
  // T] or nullptr. operands: by role, the vectors and tables that the mask reads; tables may be left out where the mask
  // reads no vector of the run.
  Status (*attention)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                      const Tables& operands, const RunContext& context);
  // For measurements: the tile of the 9.0 kernel of that number for a head size, and how many teams of it share a
  // multiprocessor; false where there is none of that number.
  bool (*kernel)(int head_size, bool bf16, int number, int* rows, int* keys, int* workers);
  // A number from 0 takes that 9.0 kernel wherever a head size has it, -1 leaves the choice to the model.
  void (*take_kernel)(int number);
};

// nullptr in a build without CUDA kernels. Needs neither a GPU nor a driver.
const CudaBackend* FindCudaBackend();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CUDA_BACKEND_H_
