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
#include "cuda/work_plan.h"
#include "plugins/core/expr.h"
#include "plugins/core/status.h"

namespace stof {
namespace cuda {

Status ToStatus(cudaError_t error, const char* what);

// What a kernel wants of a block mask. workers 0: it is not persistent and needs no plan.
struct MaskForm {
  int m = kTileRows, n = kTileKeys;
  int workers = 0;
  int64_t section = 1;  // heads whose keys and values fit the L2 cache
  TileCost cost;        // follows from the tile and the device
  bool fragments = false;  // the bits in the order of fragments.h; follows from workers, which only its kernels have
};

// A block mask in device memory, with the event behind which it is there.
class MaskEntry {
 public:
  MaskEntry() = default;
  MaskEntry(const MaskEntry&) = delete;
  MaskEntry& operator=(const MaskEntry&) = delete;
  ~MaskEntry();
  Status Upload(const BlockMask& mask, const ExprSizes& sizes, const MaskForm& form, cudaStream_t stream);
  // Lets the stream wait for the upload where that may not have ended.
  Status Join(cudaStream_t stream, bool captured) const;
  const DeviceMask& view() const { return view_; }
  // The plan for form.workers; nullptr without one.
  const WorkItem* work() const { return work_; }
  const int32_t* work_begin() const { return work_begin_; }
  // Whether some query has no key by the mask alone.
  bool empty_rows() const { return empty_rows_; }
  int64_t bytes() const { return bytes_; }

 private:
  DeviceMask view_;
  const WorkItem* work_ = nullptr;
  const int32_t* work_begin_ = nullptr;
  bool empty_rows_ = false;
  void* memory_ = nullptr;
  cudaEvent_t uploaded_ = nullptr;
  int64_t bytes_ = 0;
  mutable std::atomic<bool> ready_{false};
};

// Device masks by (device, mask, sizes, form), shared by all layers and sessions of the process. Those that a captured
// graph reads stay for ever; of others the least recently used go when the bytes exceed the capacity, after the device
// has done with them (cudaFree waits).
class DeviceMaskCache {
 public:
  static DeviceMaskCache& Global();
  // A miss while the stream is captured is an error: run once before.
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, const MaskForm& form, cudaStream_t stream,
             std::shared_ptr<const MaskEntry>* entry);

 private:
  using Key = std::tuple<int, uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int, int, int64_t>;
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
