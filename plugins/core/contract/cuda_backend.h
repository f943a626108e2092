// SPDX-License-Identifier: Apache-2.0
// What the core asks of a build with CUDA kernels. Plain C++: no CUDA header.
#ifndef STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_
#define STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_

#include <memory>

#include "plugins/core/chain/chain.h"
#include "plugins/core/ops/attention.h"

namespace stof {

// What the backend keeps for a chain with the shapes of a run.
class DeviceChain {
 public:
  virtual ~DeviceChain() = default;
};

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
  // How many choices RunContext::kernel has for this problem on the current device; 0: none.
  int (*kernels)(const AttentionArgs& args);
  // Makes the block mask that `attention` would make in its first run with these sizes, on a stream of its own, and has
  // the driver load the kernels. Pointers of args, pad and operands are not followed, only whether there are any and
  // how they are aligned. context: kernel, and keeper where the mask shall stay as long as that.
  Status (*ready)(const AttentionArgs& args, const Tensor* pad, const AttentionMask& mask, const ExprSizes& sizes,
                  const Tables& operands, const RunContext& context);
  // The device of the calling thread.
  Status (*describe)(std::string* name, int32_t* capability);
  // For the tuner: the names of the kernels that attention may be asked for (AttentionArgs::kernel), separated by
  // blanks; the model chooses among the same ones.
  Status (*kernel_names)(int64_t head_size, DType dtype, std::string* names);
  // Microseconds of one run: cuda/common/time_op.h.
  Status (*time)(const Op& op, const Tensor* inputs, int input_count, int output_count, double seconds,
                 double* microseconds);
  // Queues a chain on context.stream; inputs and outputs are device addresses by number. kept: of this bound chain
  // alone.
  Status (*chain)(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                  DeviceChain* kept, const RunContext& context);
  std::unique_ptr<DeviceChain> (*keep_chain)();
  // Makes the kernel that a first run would make.
  Status (*ready_chain)(const Chain& chain, const BoundChain& bound, DeviceChain* kept);
  // A run as a graph that can be launched again, see cuda/common/graph_capture.h; *recorded nullptr: not now. captured:
  // whether the stream is being captured.
  Status (*record)(Status (*queue)(void* self, const RunContext& context), void* self, const RunContext& context,
                   void** recorded);
  Status (*launch)(void* recorded, void* stream);
  void (*drop)(void* recorded);
  bool (*captured)(void* stream);
};

// ---- without a device, and in builds without CUDA kernels, too ----
// Why no CUDA kernel takes a problem. Pointers that are not null are checked for alignment.
Status CheckCudaAttention(const AttentionArgs& args);
// For runtimes that plan memory ahead: how many bytes `attention` asks RunContext::allocate for at most, blocks rounded
// up to 64. It grows with every size. pad: there is padding. operands: as for `attention`; their data is not read.
Status PlanCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, const ExprSizes& sizes,
                         const Tables& operands, size_t* workspace);

// nullptr in a build without CUDA kernels. Needs neither a GPU nor a driver.
const CudaBackend* FindCudaBackend();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_
