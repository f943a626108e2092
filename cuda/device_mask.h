// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_DEVICE_MASK_H_
#define STOF_CUDA_DEVICE_MASK_H_

#include <cuda_runtime.h>

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "cuda/attention.h"
#include "plugins/core/expr.h"
#include "plugins/core/status.h"

namespace stof {
namespace cuda {

Status ToStatus(cudaError_t error, const char* what);

// A block mask in device memory, with the event behind which it is there.
class MaskEntry {
 public:
  MaskEntry() = default;
  MaskEntry(const MaskEntry&) = delete;
  MaskEntry& operator=(const MaskEntry&) = delete;
  ~MaskEntry();
  Status Upload(const BlockMask& mask, cudaStream_t stream);
  // Lets the stream wait for the upload where that may not have ended.
  Status Join(cudaStream_t stream, bool captured) const;
  const DeviceMask& view() const { return view_; }
  int64_t bytes() const { return bytes_; }

 private:
  DeviceMask view_;
  void* memory_ = nullptr;
  cudaEvent_t uploaded_ = nullptr;
  int64_t bytes_ = 0;
  mutable std::atomic<bool> ready_{false};
};

// Device masks by (device, mask, sizes), shared by all layers and sessions of the process. Those that a captured graph
// reads stay for ever; of others the least recently used go when the bytes exceed the capacity, after the device has
// done with them (cudaFree waits).
class DeviceMaskCache {
 public:
  static DeviceMaskCache& Global();
  // A miss while the stream is captured is an error: run once before.
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, cudaStream_t stream,
             std::shared_ptr<const MaskEntry>* entry);

 private:
  using Key = std::tuple<int, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;
  struct Slot {
    std::shared_ptr<const MaskEntry> entry;
    std::list<Key>::iterator age;
    bool pinned = false;
  };
  std::mutex mutex_;
  std::map<Key, Slot> slots_;
  std::list<Key> ages_;  // most recent first
  int64_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_DEVICE_MASK_H_
