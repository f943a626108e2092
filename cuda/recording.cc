// SPDX-License-Identifier: Apache-2.0
#include "cuda/recording.h"

#include <cuda_runtime.h>

#include <exception>
#include <mutex>
#include <set>

#include "cuda/device_mask.h"

namespace stof {
namespace cuda {
namespace {

thread_local bool only_loading = false;

struct Loading {
  Loading() { only_loading = true; }
  ~Loading() { only_loading = false; }
};

// Addresses where nothing is.
void* Imagine(void* self, size_t bytes) {
  constexpr uintptr_t kLine = 256;
  auto* const next = static_cast<uintptr_t*>(self);
  const uintptr_t at = *next;
  *next = at + (bytes + kLine - 1) / kLine * kLine;
  return reinterpret_cast<void*>(at);
}

// On a stream that is there for nothing else.
Status Record(Queue queue, void* self, RunContext context, cudaStream_t stream) {
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), "recording of kernels"));
  uintptr_t next = uintptr_t{1} << 30;
  context.stream = stream;
  context.allocate = Imagine;
  context.self = &next;
  Status status;
  {
    const Loading loading;
    try {
      status = queue(self, context);
    } catch (const std::exception& error) {  // the recording has to end
      status = Status::Error(error.what());
    }
  }
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
  if (status.ok()) status = ToStatus(ended, "recording of kernels");
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(&executable, graph, 0), "loading of kernels");
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

}  // namespace

bool IsOnlyLoading() { return only_loading; }

Status LoadKernels(uint64_t key, Queue queue, void* self, const RunContext& context) {
  static std::mutex mutex;
  static auto* loaded = new std::set<uint64_t>;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!loaded->insert(key).second) return Status();
  }
  const RelaxedCapture relaxed;  // another thread may capture
  cudaStream_t stream = nullptr;
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"));
  const Status status = Record(queue, self, context, stream);
  cudaStreamDestroy(stream);
  cudaGetLastError();  // not to be found by others
  return status;
}

}  // namespace cuda
}  // namespace stof
