// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_PLUGINS_CORE_MASK_BLOCK_MASK_CACHE_H_
#define STOF_PLUGINS_CORE_MASK_BLOCK_MASK_CACHE_H_

#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "plugins/core/host/fork_guard.h"
#include "plugins/core/host/hash.h"
#include "plugins/core/mask/block_mask_builder.h"

namespace stof {

// What decides a block mask.
struct BlockMaskKey {
  uint64_t expression = 0;  // MaskExpr::Hash
  ExprSizes sizes;          // B and H are 1 where the expression does not depend on them
  int m = 0, n = 0;         // the tile
  bool leaves_tiles = false;

  bool operator==(const BlockMaskKey& o) const {
    return expression == o.expression && sizes == o.sizes && m == o.m && n == o.n && leaves_tiles == o.leaves_tiles;
  }
  uint64_t Hash() const;
  std::string Print() const;
};

// Block masks by key, shared by all layers and sessions of the process. The bytes of all of them count, also of those
// that somebody still reads. Where they exceed the capacity, the least recently used masks that nobody reads are
// evicted. The newest one stays, whatever its size, which BlockMaskBounds limits.
class BlockMaskCache {
 public:
  explicit BlockMaskCache(int64_t capacity_bytes = int64_t{64} << 20) : capacity_(capacity_bytes) {}
  static BlockMaskCache& Global();

  // hash: MaskExpr::Hash of expr. A mask is built outside the lock and once: concurrent callers wait for it and get the
  // same mask, or the same error. A child of fork() without the building thread builds it anew. Masks that are
  // Status::TooLarge are remembered, too.
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n, const BlockMaskBounds& bounds,
             std::shared_ptr<const BlockMask>* mask);
  Status Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
             std::shared_ptr<const BlockMask>* mask) {
    return Get(expr, hash, sizes, m, n, BlockMaskBounds(), mask);
  }
  // For callers that keep a mask for their lifetime. Gives nullptr where all kept masks would exceed half of the
  // capacity: then call Get in every run.
  Status GetToKeep(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
                   const BlockMaskBounds& bounds, std::shared_ptr<const BlockMask>* mask);

  struct Stats {
    int64_t entries = 0, bytes = 0, hits = 0, misses = 0, builds = 0;
    int64_t kept_bytes = 0;  // the part of `bytes` in masks that GetToKeep gave and somebody still has
  };
  Stats GetStats() const;
  void Clear();  // all but what is being built

 private:
  using Key = BlockMaskKey;
  // The result of a build. `age` and the copy for the slot are made beforehand, so that storing it needs no memory.
  struct Finished {
    std::list<Key> age;
    std::shared_ptr<const BlockMask> mask;
    Status status, status_of_slot;
  };
  // A build in progress, for which concurrent callers wait.
  struct Build {
    std::mutex mutex;
    std::condition_variable ended;
    bool done = false;
    Status status;
    std::shared_ptr<const BlockMask> mask;
    const uint64_t generation = ForkGeneration();

    void End(Finished* made) noexcept;  // nullptr: there was no memory
    Status Wait(std::shared_ptr<const BlockMask>* result);
  };
  struct Slot {
    std::shared_ptr<Build> build;           // while it is built
    std::shared_ptr<const BlockMask> mask;  // nullptr where it is too large
    Status too_large;
    std::weak_ptr<const BlockMask> kept;  // what GetToKeep gave
    std::list<Key>::iterator age;         // unless it is built
    int64_t bytes = 0;
  };
  struct State {
    std::unordered_map<Key, Slot, KeyHash> slots;
    std::list<Key> ages;  // most recent first; finished entries only
    Stats stats;
  };
  static Key KeyOf(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n, bool leaves_tiles);
  Status GetByKey(const Key& key, const MaskExpr& expr, const ExprSizes& sizes, int m, int n,
                  const BlockMaskBounds& bounds, std::shared_ptr<const BlockMask>* mask);
  Status FindOrBegin(const Key& key, std::shared_ptr<Build>* build, bool* begun,
                     std::shared_ptr<const BlockMask>* mask);
  Status BuildAndStore(const Key& key, const MaskExpr& expr, const ExprSizes& sizes, int m, int n,
                       const BlockMaskBounds& bounds, Build* build);
  void End(const Key& key, Finished* made, Build* build) noexcept;
  void Evict(State* state) const;
  static int64_t KeptBytes(const State& state);

  mutable ForkSafe<State> state_;
  const int64_t capacity_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_BLOCK_MASK_CACHE_H_
