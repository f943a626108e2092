// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/device_columns.h"

#include <cuda_runtime.h>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {

DeviceColumnsEntry::~DeviceColumnsEntry() {
  if (memory_ == nullptr || !IsCudaUsable()) return;
  const RelaxedCapture relaxed;
  cudaFree(memory_);
}

Status DeviceColumnsEntry::Upload(const KeyColumns& columns, int device) {
  const ColumnImage image = MakeColumnImage(columns);
  const size_t list = image.list.size() * 4, below = image.below.size() * 4, words = image.words.size() * 4;
  const RelaxedCapture relaxed;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory_, list + below + words), "memory for key columns"));
  cudaStream_t stream = nullptr;  // of its own: the default stream would wait for others
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"));
  char* const base = static_cast<char*>(memory_);
  cudaError_t error = cudaMemcpyAsync(base, image.words.data(), words, cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(base + words, image.list.data(), list, cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(base + words + list, image.below.data(), below, cudaMemcpyHostToDevice, stream);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  STOF_RETURN_IF_ERROR(ToStatus(error, "copy of key columns"));
  view_ = image.view;
  view_.words = reinterpret_cast<const uint32_t*>(base);
  view_.list = reinterpret_cast<const int32_t*>(base + words);
  view_.below = reinterpret_cast<const int32_t*>(base + words + list);
  device_ = device;
  return Status();
}

Status GetDeviceColumns(const KeyColumns& columns, const RunContext& context,
                        std::shared_ptr<const DeviceColumnsEntry>* entry) {
  entry->reset();
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream), &capture), "state of the stream"));
  const bool is_captured = capture != cudaStreamCaptureStatusNone;
  auto known = std::static_pointer_cast<const DeviceColumnsEntry>(columns.on_device().Get());
  if (known == nullptr || known->device() != device) {
    if (is_captured) return Status();
    auto made = std::make_shared<DeviceColumnsEntry>();
    STOF_RETURN_IF_ERROR(made->Upload(columns, device));
    columns.on_device().Set(made);
    known = std::move(made);
  }
  if (is_captured && context.keeper != nullptr && !IsOnlyLoading()) context.keeper->Keep(known);
  *entry = std::move(known);
  return Status();
}

}  // namespace cuda
}  // namespace stof
