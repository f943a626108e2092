// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_MASK_DEVICE_MASK_H_
#define STOF_CUDA_MASK_DEVICE_MASK_H_

#include <cuda_runtime.h>

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "cuda/attention/params.h"
#include "cuda/schedule/dynamic_counter.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/contract/status.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

Status ToStatus(cudaError_t error, const char* what);

// Lets the thread do what another thread's capture would forbid: allocate, free, ask for the state of an event.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The form of a block mask that a kernel reads. workers 0: the kernel is not persistent and needs no tile schedule.
struct MaskForm {
  int m = kTileRows, n = kTileKeys;
  int workers = 0;
  int64_t section = 1;     // heads whose keys and values fit the L2 cache
  int64_t sharing = 1;     // query heads of a key head
  TileCost cost;           // of kernels with one tile, that of a row tells which
  bool fragments = false;  // bits in the order of fragments.h
  // Query heads of a key head whose rows may be stacked (stacked_mask.h), and the number of SMs, which decides it.
  int64_t group = 1;
  int multiprocessors = 0;
};

// A block mask in device memory, with the event of its upload.
class MaskEntry {
 public:
  MaskEntry() = default;
  MaskEntry(const MaskEntry&) = delete;
  MaskEntry& operator=(const MaskEntry&) = delete;
  ~MaskEntry();
  // stacked: the mask is stacked by form.group.
  Status Upload(const BlockMask& mask, const ExprSizes& sizes, const MaskForm& form, bool stacked, cudaStream_t stream);
  // Lets the stream wait for an upload that may not have ended.
  Status Join(cudaStream_t stream, bool captured) const;
  const DeviceMask& view() const { return view_; }
  // The plan for up to form.workers; nullptr without one.
  const WorkItem* work() const { return work_; }
  const WorkStart* work_start() const { return work_start_; }
  int workers() const { return workers_; }
  // The items of dynamic scheduling, and their atomic counters.
  int32_t drawn_begin() const { return drawn_begin_; }
  int32_t drawn_end() const { return drawn_end_; }
  const DrawCounts& draw_counts() const { return draw_counts_; }
  // Rows with split-KV, and the number of splits of all of them.
  const CutRow* cut() const { return cut_; }
  int32_t cut_rows() const { return cut_rows_; }
  int64_t parts() const { return parts_; }
  // Whether the mask leaves a query fully masked.
  bool empty_rows() const { return empty_rows_; }
  // Tiles of the longest row.
  int64_t longest_row() const { return longest_row_; }
  // Whether a tile has the rows of all query heads of a group (GQA packing).
  bool stacked() const { return stacked_; }
  // Whether there is one row of tiles for all heads and batches; where its full tiles begin.
  bool one_row() const { return one_row_; }
  int32_t one_row_full() const { return one_row_full_; }
  int64_t bytes() const { return bytes_; }

 private:
  DeviceMask view_;
  const WorkItem* work_ = nullptr;
  const WorkStart* work_start_ = nullptr;
  int workers_ = 0;
  int32_t drawn_begin_ = 0, drawn_end_ = 0;
  DrawCounts draw_counts_;
  const CutRow* cut_ = nullptr;
  int32_t cut_rows_ = 0;
  int64_t parts_ = 0;
  bool empty_rows_ = false;
  int64_t longest_row_ = 0;
  bool stacked_ = false;
  bool one_row_ = false;
  int32_t one_row_full_ = 0;
  void* memory_ = nullptr;
  cudaEvent_t uploaded_ = nullptr;
  int64_t bytes_ = 0;
  mutable std::atomic<bool> ready_{false};
};

// What decides a block mask in device memory: the mask and the fields of MaskForm.
struct DeviceMaskKey {
  int device = 0;
  uint64_t expression = 0;  // MaskExpr::Hash
  ExprSizes sizes;
  int m = 0, n = 0, workers = 0;
  int64_t section = 0, sharing = 0;
  uint64_t cost = 0;  // hash of MaskForm::cost
  int64_t group = 0;
  bool fragments = false;

  bool operator==(const DeviceMaskKey& o) const {
    return device == o.device && expression == o.expression && sizes == o.sizes && m == o.m && n == o.n &&
           workers == o.workers && section == o.section && sharing == o.sharing && cost == o.cost && group == o.group &&
           fragments == o.fragments;
  }
  uint64_t Hash() const;
  std::string Print() const;
};

// Device masks by key, shared by all layers and sessions of the process. Masks that a captured graph or a node of fixed
// shapes reads are pinned: they live as long as a keeper holds them, for ever where there is none, and do not count.
// Nodes pin no more than the capacity, graphs what they read. The least recently used of the others are evicted when
// their bytes exceed the capacity, after the device has done with them (cudaFree waits). One stays, whatever its size,
// which BlockMaskBounds limits.
class DeviceMaskCache {
 public:
  struct Stats {
    int64_t entries = 0, bytes = 0;                // those that may go
    int64_t pinned_entries = 0, pinned_bytes = 0;  // those that stay
  };
  explicit DeviceMaskCache(int64_t capacity) : capacity_(capacity) {}
  static DeviceMaskCache& Global();
  // Nothing can be uploaded while the stream is captured: an absent mask is then `missing`. keep: the keeper shall hold
  // the entry, where there is room; while the stream is captured it does in any case.
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, const MaskForm& form, cudaStream_t stream,
             Keeper* keeper, bool keep, std::shared_ptr<const MaskEntry>* entry, bool* missing);
  Stats GetStats() const;

 private:
  using Key = DeviceMaskKey;
  struct Slot {
    std::shared_ptr<const MaskEntry> entry;  // nullptr where keepers hold it
    std::weak_ptr<const MaskEntry> kept;
    std::list<Key>::iterator age;  // unless pinned
    bool pinned = false;
  };
  bool IsRoomToPin(const MaskEntry& entry) const;
  void Pin(Slot* slot, Keeper* keeper, const std::shared_ptr<const MaskEntry>& entry);
  void DropReleased();
  const int64_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<Key, Slot, KeyHash> slots_;
  std::list<Key> ages_;  // of those that are not pinned, most recent first
  int64_t bytes_ = 0;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_DEVICE_MASK_H_
