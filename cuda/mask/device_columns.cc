// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/device_columns.h"

#include <cuda_runtime.h>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/mask/device_copy.h"

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
  const auto upload = [&](int device, DeviceColumnsEntry* made) { return made->Upload(columns, device); };
  return GetDeviceCopy(columns.on_device(), context, upload, entry);
}

}  // namespace cuda
}  // namespace stof
