// SPDX-License-Identifier: Apache-2.0
// Copies of host data on a device, which a slot beside the data keeps for later runs.
#ifndef STOF_CUDA_MASK_DEVICE_COPY_H_
#define STOF_CUDA_MASK_DEVICE_COPY_H_

#include <cuda_runtime.h>

#include <memory>
#include <utility>

#include "cuda/common/one_process.h"
#include "cuda/common/status.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/columns/cache_slot.h"

namespace stof {
namespace cuda {

// The copy on the current device. The first call makes it: upload(device, Entry*) gives a Status, and has waited. While
// the stream is captured an absent copy stays nullptr, and the keeper holds one that is there.
template <typename Entry, typename Upload>
Status GetDeviceCopy(const MaskCacheSlot& slot, const RunContext& context, const Upload& upload,
                     std::shared_ptr<const Entry>* entry) {
  entry->reset();
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  STOF_RETURN_IF_ERROR(
      ToStatus(cudaStreamIsCapturing(static_cast<cudaStream_t>(context.stream), &capture), "state of the stream"));
  const bool is_captured = capture != cudaStreamCaptureStatusNone;
  auto known = std::static_pointer_cast<const Entry>(slot.Get());
  if (known == nullptr || known->device() != device) {
    if (is_captured) return Status();
    auto made = std::make_shared<Entry>();
    STOF_RETURN_IF_ERROR(upload(device, made.get()));
    slot.Set(made);
    known = std::move(made);
  }
  if (is_captured && context.keeper != nullptr && !IsOnlyLoading()) context.keeper->Keep(known);
  *entry = std::move(known);
  return Status();
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_DEVICE_COPY_H_
