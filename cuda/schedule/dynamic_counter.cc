// SPDX-License-Identifier: Apache-2.0
#include "cuda/schedule/dynamic_counter.h"

#include <memory>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/common/stream_memory.h"

namespace stof {
namespace cuda {
namespace {

Status MakeCounter(int32_t** counter) {
  const RelaxedCapture relaxed;
  cudaStream_t uploads = nullptr;
  STOF_RETURN_IF_ERROR(UploadStream(&uploads));
  void* memory = nullptr;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory, sizeof(int32_t)), "memory for a tile counter"));
  cudaError_t error = cudaMemsetAsync(memory, 0, sizeof(int32_t), uploads);
  if (error == cudaSuccess) error = cudaStreamSynchronize(uploads);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return ToStatus(error, "clearing of a tile counter");
  }
  *counter = static_cast<int32_t*>(memory);
  return Status();
}

}  // namespace

TileCounters::~TileCounters() {
  if (!IsCudaUsable()) return;
  const RelaxedCapture relaxed;
  for (int32_t* counter : more_) cudaFree(counter);
}

Status TileCounters::Get(cudaStream_t stream, Keeper* keeper, int32_t** counter) const {
  *counter = nullptr;
  if (IsOnlyLoading()) return Status();
  if (IsCapturing(stream)) {
    STOF_RETURN_IF_ERROR(MakeCounter(counter));
    if (keeper == nullptr) return Status();
    keeper->Keep(std::shared_ptr<const void>(*counter, [](void* own) {
      if (!IsCudaUsable()) return;
      const RelaxedCapture relaxed;
      cudaFree(own);  // waits until the device has finished with it
    }));
    return Status();
  }
  unsigned long long id = 0;  // unique for the process, unlike the handle
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamGetId(stream, &id), "number of the stream"));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = of_streams_.find(id);
  if (found != of_streams_.end()) {
    *counter = found->second;
    return Status();
  }
  if (of_streams_.size() < kStreams) {
    *counter = zeros_ + of_streams_.size() * kStride;
  } else {
    STOF_RETURN_IF_ERROR(MakeCounter(counter));
    more_.push_back(*counter);
  }
  of_streams_.emplace(id, *counter);
  return Status();
}

}  // namespace cuda
}  // namespace stof
