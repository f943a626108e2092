// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/relative/device_rows.h"

#include <cuda_runtime.h>

#include <utility>
#include <vector>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "plugins/core/mask/columns/cache_slot.h"

namespace stof {
namespace cuda {

DeviceRowsEntry::~DeviceRowsEntry() {
  if (memory_ == nullptr || !IsCudaUsable()) return;
  const RelaxedCapture relaxed;
  cudaFree(memory_);
}

Status DeviceRowsEntry::Upload(const RelativeRows& rows, int64_t queries, int64_t keys, int device) {
  std::vector<int32_t> words(rows.row, rows.row + rows.count);
  const bool has_parts = rows.key_part != nullptr || rows.query_part != nullptr;
  if (has_parts) {
    for (int64_t j = 0; j < keys; ++j) words.push_back(static_cast<int32_t>(rows.KeyPart(j)));
    for (int64_t i = 0; i < queries; ++i) words.push_back(static_cast<int32_t>(rows.QueryPart(i)));
  }
  const size_t bytes = words.size() * sizeof(int32_t);
  const RelaxedCapture relaxed;
  STOF_RETURN_IF_ERROR(ToStatus(cudaMalloc(&memory_, bytes), "memory for rows of relative positions"));
  cudaStream_t stream = nullptr;  // of its own: the default stream would wait for others
  STOF_RETURN_IF_ERROR(ToStatus(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream"));
  cudaError_t error = cudaMemcpyAsync(memory_, words.data(), bytes, cudaMemcpyHostToDevice, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  STOF_RETURN_IF_ERROR(ToStatus(error, "copy of rows of relative positions"));
  row_ = static_cast<const int32_t*>(memory_);
  if (has_parts) key_part_ = row_ + rows.count, query_part_ = key_part_ + keys;
  query_position_ = rows.query_position;
  device_ = device;
  return Status();
}

Status GetDeviceRows(const RelativeRows& rows, int64_t queries, int64_t keys, const RunContext& context,
                     std::shared_ptr<const DeviceRowsEntry>* entry) {
  entry->reset();
  if (rows.on_device == nullptr) return Status::Error("rows of relative positions have no place for their copy");
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream), &capture), "state of the stream"));
  const bool is_captured = capture != cudaStreamCaptureStatusNone;
  auto known = std::static_pointer_cast<const DeviceRowsEntry>(rows.on_device->Get());
  if (known == nullptr || known->device() != device) {
    if (is_captured) return Status();
    auto made = std::make_shared<DeviceRowsEntry>();
    STOF_RETURN_IF_ERROR(made->Upload(rows, queries, keys, device));
    rows.on_device->Set(made);
    known = std::move(made);
  }
  if (is_captured && context.keeper != nullptr && !IsOnlyLoading()) context.keeper->Keep(known);
  *entry = std::move(known);
  return Status();
}

}  // namespace cuda
}  // namespace stof
