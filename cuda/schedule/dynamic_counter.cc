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

Status MakeCount(int32_t** count) {
  const RelaxedCapture relaxed;
  cudaStream_t uploads = nullptr;
  STOF_RETURN_IF_ERROR(UploadStream(&uploads));
  void* memory = nullptr;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory, sizeof(int32_t)), "memory for a count of drawn rows"));
  cudaError_t error = cudaMemsetAsync(memory, 0, sizeof(int32_t), uploads);
  if (error == cudaSuccess) error = cudaStreamSynchronize(uploads);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return ToStatus(error, "clearing of a count of drawn rows");
  }
  *count = static_cast<int32_t*>(memory);
  return Status();
}

}  // namespace

DrawCounts::~DrawCounts() {
  if (!IsCudaUsable()) return;
  const RelaxedCapture relaxed;
  for (int32_t* count : more_) cudaFree(count);
}

Status DrawCounts::Get(cudaStream_t stream, Keeper* keeper, int32_t** count) const {
  *count = nullptr;
  if (IsOnlyLoading()) return Status();
  if (Captured(stream)) {
    STOF_RETURN_IF_ERROR(MakeCount(count));
    if (keeper == nullptr) return Status();
    keeper->Keep(std::shared_ptr<const void>(*count, [](void* own) {
      if (!IsCudaUsable()) return;
      const RelaxedCapture relaxed;
      cudaFree(own);  // waits for the device to be done with it
    }));
    return Status();
  }
  unsigned long long id = 0;  // unlike the handle, no other stream's ever
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamGetId(stream, &id), "number of the stream"));
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = of_streams_.find(id);
  if (found != of_streams_.end()) {
    *count = found->second;
    return Status();
  }
  if (of_streams_.size() < kStreams) {
    *count = zeros_ + of_streams_.size() * kApart;
  } else {
    STOF_RETURN_IF_ERROR(MakeCount(count));
    more_.push_back(*count);
  }
  of_streams_.emplace(id, *count);
  return Status();
}

}  // namespace cuda
}  // namespace stof
