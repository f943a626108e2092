// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/skip_counts.h"

#include <cuda_runtime.h>

#include <map>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/common/stream_memory.h"

namespace stof {
namespace cuda {
namespace {

constexpr size_t kCountBytes = 2 * sizeof(unsigned long long);

// By device.
using CountsOfDevices = ForkSafe<std::map<int, unsigned long long*>>;
CountsOfDevices& AllCounts() {
  static ProcessWide<CountsOfDevices> counts;
  return counts.Get();
}

// Calls `use(counts, stream)` for each device that has counts, once its kernels have ended.
template <typename Use>
void ForEachDevice(Use use) {
  int current = 0;
  if (!IsCudaUsable()) return;
  const CountsOfDevices::Access all = AllCounts().Lock();
  if (all->empty() || cudaGetDevice(&current) != cudaSuccess) return;
  const RelaxedCapture relaxed;
  for (const auto& [device, counts] : *all) {
    cudaStream_t stream = nullptr;
    if (cudaSetDevice(device) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess || !UploadStream(&stream).ok()) {
      cudaGetLastError();  // the next run reports it
      continue;
    }
    use(counts, stream);
    cudaStreamSynchronize(stream);
  }
  cudaSetDevice(current);
}

}  // namespace

Status GetSkipCounts(unsigned long long** counts) {
  *counts = nullptr;
  if (IsOnlyLoading()) return Status();
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  const CountsOfDevices::Access all = AllCounts().Lock();
  const auto found = all->find(device);
  if (found != all->end()) {
    *counts = found->second;
    return Status();
  }
  const RelaxedCapture relaxed;
  cudaStream_t uploads = nullptr;
  STOF_RETURN_IF_ERROR(UploadStream(&uploads));
  void* memory = nullptr;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory, kCountBytes), "memory for counts"));
  cudaError_t error = cudaMemsetAsync(memory, 0, kCountBytes, uploads);
  if (error == cudaSuccess) error = cudaStreamSynchronize(uploads);
  if (error != cudaSuccess) {
    cudaFree(memory);
    return ToStatus(error, "clearing of counts");
  }
  *counts = static_cast<unsigned long long*>(memory);
  all->emplace(device, *counts);
  return Status();
}

void AddSkipCounts(SkipCounts* counts) {
  ForEachDevice([counts](const unsigned long long* from, cudaStream_t stream) {
    unsigned long long read[2] = {};
    if (cudaMemcpyAsync(read, from, kCountBytes, cudaMemcpyDeviceToHost, stream) != cudaSuccess ||
        cudaStreamSynchronize(stream) != cudaSuccess) {
      return;
    }
    counts->scored += read[0];
    counts->skipped += read[1];
  });
}

void ResetSkipCounts() {
  ForEachDevice(
      [](unsigned long long* counts, cudaStream_t stream) { cudaMemsetAsync(counts, 0, kCountBytes, stream); });
}

}  // namespace cuda
}  // namespace stof
