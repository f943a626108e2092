// SPDX-License-Identifier: Apache-2.0
// RunContext over ONNX Runtime: memory, and threads of its intra-op pool.
#ifndef STOF_PLUGINS_ORT_RUN_CONTEXT_H_
#define STOF_PLUGINS_ORT_RUN_CONTEXT_H_

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plugins/core/contract/cuda_backend.h"

namespace stof::ort {

// Memory of one Run. On the CPU from ONNX Runtime's arena, returned at the end. On a device the end comes while kernels
// still use it, and another thread's Run on another stream must not be given it before they are done. The arena can tie
// memory to a stream, but the call for it (KernelContext_GetScratchBuffer) ends the process when the arena is full: it
// throws, and is noexcept (seen with gpu_mem_limit). So such memory comes from CUDA, in the order of the stream. While
// a graph is captured it is the arena's, as all that the graph uses: ONNX Runtime then has one thread and one stream.
//
// Each call of CUDA takes about a microsecond of the host, which small operators wait for. So small blocks share one.
class RunScratch {
 public:
  // node: in messages. own: the allocator of the node's provider, taken where the context does not know its memory;
  // nullptr: there is none.
  RunScratch(const OrtApi* api, const OrtKernelContext* context, const std::string& node, OrtAllocator* own);
  RunScratch(const RunScratch&) = delete;
  RunScratch& operator=(const RunScratch&) = delete;
  ~RunScratch();
  // From here on memory is that of the current device, in the order of the stream.
  void UseDevice(void* stream);
  static void* Allocate(void* self, size_t bytes);  // RunContext::allocate
  // The error of a runtime that gives no arena. The caller owns it; nullptr: there is none.
  OrtStatus* TakeStatus();

 private:
  void* FromArena(size_t bytes);
  // Memory in the order of the stream. False where the device has none, or the stream is captured.
  bool FromStream(size_t bytes, void** block);
  OrtStatus* FindArena();

  const OrtApi* api_;
  const OrtKernelContext* context_;
  const std::string& node_;
  OrtAllocator* own_;
  OrtAllocator* arena_ = nullptr;  // found when it is needed
  OrtStatus* status_ = nullptr;
  const CudaBackend* backend_ = nullptr;  // of a device
  void* stream_ = nullptr;
  uintptr_t shared_ = 0;  // where the free part of the shared block begins
  size_t shared_left_ = 0;
  std::vector<void*> blocks_, ordered_;
};

// How many work slots a run gets. The C API does not give the size of the intra-op pool; slots beyond it only cost an
// empty call. Computed once: the C library opens a file for it, which takes as long as a small operator.
int RunThreads();

// The intra-op pool during one run; status: its first error.
struct Pool {
  ~Pool() {
    if (status != nullptr) api->ReleaseStatus(status);
  }
  const OrtApi* api;
  const OrtKernelContext* context;
  OrtStatus* status = nullptr;
};

// Parallel::run; self: a Pool.
void RunOnPool(void* self, void (*fn)(void* user, size_t i), size_t count, void* user);

}  // namespace stof::ort
#endif  // STOF_PLUGINS_ORT_RUN_CONTEXT_H_
