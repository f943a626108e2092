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

#include "cuda/mask/mask_params.h"
#include "cuda/schedule/dynamic_counter.h"
#include "cuda/schedule/tile_schedule.h"
#include "plugins/core/base/status.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/expr.h"

namespace stof {
namespace cuda {

// What a kernel wants of a block mask. ctas 0: it is not persistent and needs no tile schedule.
struct MaskForm {
  int m = kTileRows, n = kTileKeys;
  int ctas = 0;
  int64_t l2_heads = 1;    // heads whose keys and values fit the L2 cache
  int64_t group_size = 1;  // query heads of a key head
  TileCost cost;           // of kernels with one tile, that of a row tells which
  bool fragments = false;  // bits in the order of fragments.h
  // Query heads of a key head whose rows may be stacked (stacked_mask.h), and the number of SMs, which decides it.
  int64_t group = 1;
  int sm_count = 0;
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
  // The tile schedule for up to form.ctas CTAs; nullptr without one.
  const WorkTile* tiles() const { return tiles_; }
  const CtaStart* starts() const { return starts_; }
  int ctas() const { return ctas_; }
  // Its dynamic tiles, and their atomic counters.
  int32_t dynamic_begin() const { return dynamic_begin_; }
  int32_t dynamic_end() const { return dynamic_end_; }
  const TileCounters& tile_counters() const { return tile_counters_; }
  // Its split rows, and the number of their splits.
  const SplitRow* split_rows() const { return split_rows_; }
  int32_t split_row_count() const { return split_row_count_; }
  int64_t splits() const { return splits_; }
  // Whether some query has no key by the mask alone.
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
  const WorkTile* tiles_ = nullptr;
  const CtaStart* starts_ = nullptr;
  int ctas_ = 0;
  int32_t dynamic_begin_ = 0, dynamic_end_ = 0;
  TileCounters tile_counters_;
  const SplitRow* split_rows_ = nullptr;
  int32_t split_row_count_ = 0;
  int64_t splits_ = 0;
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
  int m = 0, n = 0, ctas = 0;
  int64_t l2_heads = 0, group_size = 0;
  uint64_t cost = 0;  // hash of MaskForm::cost
  int64_t group = 0;
  bool fragments = false;

  bool operator==(const DeviceMaskKey& o) const {
    return device == o.device && expression == o.expression && sizes == o.sizes && m == o.m && n == o.n &&
           ctas == o.ctas && l2_heads == o.l2_heads && group_size == o.group_size && cost == o.cost &&
           group == o.group && fragments == o.fragments;
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
