// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/relative/device_rows.h"

#include <cuda_runtime.h>

#include <vector>

#include "cuda/common/graph_capture.h"
#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "cuda/mask/device_copy.h"

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
  const auto upload = [&](int device, DeviceRowsEntry* made) { return made->Upload(rows, queries, keys, device); };
  return GetDeviceCopy(*rows.on_device, context, upload, entry);
}

}  // namespace cuda
}  // namespace stof
