// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/graph_capture.h"

#include <cuda_runtime.h>

#include <exception>
#include <mutex>
#include <set>

#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

thread_local bool only_loading = false;

struct Loading {
  Loading() { only_loading = true; }
  ~Loading() { only_loading = false; }
};

// An allocator of addresses that name no memory.
void* FakeAllocate(void* self, size_t bytes) {
  constexpr uintptr_t kLine = 256;
  auto* const next = static_cast<uintptr_t*>(self);
  const uintptr_t at = *next;
  *next = at + (bytes + kLine - 1) / kLine * kLine;
  return reinterpret_cast<void*>(at);
}

// A process captures one run at a time: else the driver would load the kernels of several threads at once.
std::mutex& OneAtATime() {
  static auto* mutex = new std::mutex;  // never destroyed: threads may outlive static objects
  return *mutex;
}

// A stream for one capture.
struct CaptureStream {
  CaptureStream() { status = ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"); }
  CaptureStream(const CaptureStream&) = delete;
  CaptureStream& operator=(const CaptureStream&) = delete;
  ~CaptureStream() {
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaGetLastError();  // cleared, so that no later call reports it
  }
  Status status;
  cudaStream_t stream = nullptr;
};

Status Capture(Queue queue, void* self, RunContext context, cudaGraphExec_t* executable) {
  const RelaxedCapture relaxed;  // another thread may capture at the same time
  const CaptureStream own;
  STOF_RETURN_IF_ERROR(own.status);
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamBeginCapture(own.stream, cudaStreamCaptureModeRelaxed), "graph capture"));
  context.stream = own.stream;
  Status status;
  try {
    status = queue(self, context);
  } catch (const std::exception& error) {  // the capture has to end
    status = Status::Error(error.what());
  }
  cudaGraph_t graph = nullptr;
  const cudaError_t ended = cudaStreamEndCapture(own.stream, &graph);
  if (status.ok()) status = ToStatus(ended, "graph capture");
  if (status.ok()) status = ToStatus(cudaGraphInstantiate(executable, graph, 0), "instantiation of a graph");
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

}  // namespace

bool IsOnlyLoading() { return only_loading; }

Status LoadKernels(uint64_t key, Queue queue, void* self, const RunContext& context) {
  static auto* loaded = new std::set<uint64_t>;
  // Another thread that needs the same kernels waits here until they are loaded.
  const std::lock_guard<std::mutex> lock(OneAtATime());
  if (loaded->count(key) != 0) return Status();
  uintptr_t next = uintptr_t{1} << 30;
  RunContext capture_context = context;
  capture_context.allocate = FakeAllocate;
  capture_context.self = &next;
  cudaGraphExec_t executable = nullptr;
  const Loading loading;
  const Status status = Capture(queue, self, capture_context, &executable);
  if (executable != nullptr) cudaGraphExecDestroy(executable);
  constexpr size_t kMostKeys = 1 << 16;  // bounds the memory where sizes change with every run
  if (loaded->size() >= kMostKeys) loaded->clear();
  if (status.ok()) loaded->insert(key);
  return status;
}

Status CaptureRun(Queue queue, void* self, const RunContext& context, void** graph) {
  *graph = nullptr;
  const std::unique_lock<std::mutex> lock(OneAtATime(), std::try_to_lock);
  if (!lock.owns_lock()) return Status();
  cudaGraphExec_t executable = nullptr;
  STOF_RETURN_IF_ERROR(Capture(queue, self, context, &executable));
  *graph = executable;
  return Status();
}

Status ReplayGraph(void* graph, void* stream) {
  return ToStatus(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), static_cast<cudaStream_t>(stream)),
                  "launch of a captured run");
}

void DestroyCapturedGraph(void* graph) {
  const RelaxedCapture relaxed;
  if (cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)) != cudaSuccess) cudaGetLastError();
}

}  // namespace cuda
}  // namespace stof
