// SPDX-License-Identifier: Apache-2.0
#include "cuda/draw_counts.h"

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/device_mask.h"
#include "cuda/recording.h"
#include "cuda/stream_memory.h"

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
  if (error != cudaSuccess) cudaFree(memory);
  *count = static_cast<int32_t*>(memory);
  return ToStatus(error, "clearing of a count of drawn rows");
}

Status CountOfStream(cudaStream_t stream, int32_t** count) {
  using Key = std::pair<int, unsigned long long>;
  // Never destroyed: at exit the driver may be gone before static objects are.
  static auto* counts = new std::map<Key, int32_t*>;
  static std::mutex mutex;
  Key key = {};
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&key.first), "current device"));
  // Unlike its handle, no other stream's ever.
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamGetId(stream, &key.second), "number of the stream"));
  const std::lock_guard<std::mutex> lock(mutex);
  int32_t*& own = (*counts)[key];
  if (own == nullptr) STOF_RETURN_IF_ERROR(MakeCount(&own));
  *count = own;
  return Status();
}

}  // namespace

Status DrawCount(cudaStream_t stream, Keeper* keeper, int32_t** count) {
  *count = nullptr;
  if (IsOnlyLoading()) return Status();
  if (!Captured(stream)) return CountOfStream(stream, count);
  STOF_RETURN_IF_ERROR(MakeCount(count));
  if (keeper == nullptr) return Status();
  keeper->Keep(std::shared_ptr<const void>(*count, [](void* own) {
    const RelaxedCapture relaxed;
    cudaFree(own);  // waits for the device to be done with it
  }));
  return Status();
}

}  // namespace cuda
}  // namespace stof
