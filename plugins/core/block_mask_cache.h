// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_BLOCK_MASK_CACHE_H_
#define STOF_PLUGINS_CORE_BLOCK_MASK_CACHE_H_

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "plugins/core/block_mask_builder.h"

namespace stof {

// Block masks by (mask, sizes, tile), shared by all layers and sessions of the process. Least recently used ones go
// when the bytes exceed the capacity; whoever still computes with one keeps it alive.
class BlockMaskCache {
 public:
  explicit BlockMaskCache(int64_t capacity_bytes = int64_t{64} << 20) : capacity_(capacity_bytes) {}
  static BlockMaskCache& Global();

  // hash: MaskExpr::Hash of expr. Built outside the lock and once: others who ask meanwhile wait for it.
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
             std::shared_ptr<const BlockMask>* mask);

  struct Stats {
    int64_t entries = 0, bytes = 0, hits = 0, misses = 0, builds = 0;
  };
  Stats GetStats() const;
  void Clear();

 private:
  using Key = std::tuple<uint64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, int>;
  struct Slot {
    std::shared_ptr<const BlockMask> mask;  // null while it is built
    int64_t bytes = 0;
    std::list<Key>::iterator age;
  };
  void Evict();

  mutable std::mutex mutex_;
  std::condition_variable built_;
  std::map<Key, Slot> slots_;
  std::list<Key> ages_;  // most recent first; finished entries only
  int64_t capacity_;
  Stats stats_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_BLOCK_MASK_CACHE_H_
