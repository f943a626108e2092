// SPDX-License-Identifier: Apache-2.0
// The one table of what a build with CUDA kernels does for the core. Plain C++: no CUDA header.
#ifndef STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_
#define STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/contract/chain.h"
#include "plugins/core/contract/gemm.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/packed_sequences.h"
#include "plugins/core/contract/paged_attention.h"
#include "plugins/core/contract/sparse_mlp.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {

struct CudaBackend {
  // ---- the current device of the calling thread ----
  Status (*current_device)(int* id) = nullptr;
  Status (*describe_device)(std::string* name, int32_t* capability) = nullptr;
  // Copies to host memory and waits for it: for constants, when an operator is prepared.
  Status (*copy_to_host)(const void* from, size_t bytes, void* to) = nullptr;

  // ---- streams ----
  // Stream-ordered memory: whoever gets it next, on any stream, has it after what this stream does until it is freed.
  // False where the device has no such memory or the stream is being captured; else *memory, nullptr if none is left.
  bool (*allocate_async)(void* stream, size_t bytes, void** memory) = nullptr;
  void (*free_async)(void* stream, void* memory) = nullptr;
  bool (*is_capturing)(void* stream) = nullptr;
  // Waits for the stream unless it is being captured; whether it is.
  bool (*synchronize_unless_capturing)(void* stream) = nullptr;
  // Calls run(self), which may allocate while a stream is being captured.
  void (*call_in_relaxed_capture)(void (*run)(void* self), void* self) = nullptr;

  // ---- graph capture: cuda/common/graph_capture.h ----
  // A run as a graph that can be launched again. *graph is nullptr where another thread is capturing.
  Status (*capture_graph)(Status (*queue)(void* self, const RunContext& context), void* self, const RunContext& context,
                          void** graph) = nullptr;
  Status (*replay_graph)(void* graph, void* stream) = nullptr;
  void (*destroy_graph)(void* graph) = nullptr;

  // Microseconds of one run of any operator: cuda/common/time_op.h.
  Status (*time_op)(const Op& op, const Tensor* inputs, int input_count, int output_count, double seconds,
                    double* microseconds) = nullptr;

  // ---- operators: one member each ----
  AttentionBackend attention;
  CachedAttentionBackend cached_attention;
  PagedAttentionBackend paged_attention;
  PackedSequencesBackend packed_sequences;
  ChainBackend chain;
  GemmBackend gemm;
  SparseMlpBackend sparse_mlp;
};

// nullptr in a build without CUDA kernels. Needs neither a GPU nor a driver.
const CudaBackend* FindCudaBackend();

// The error of an operator that is run on a device in a build without CUDA kernels.
constexpr char kNoCudaKernels[] =
    "this build has no CUDA kernels; in stof's source folder: CMAKE_ARGS=-DSTOF_CUDA=ON pip install .";

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CUDA_BACKEND_H_
