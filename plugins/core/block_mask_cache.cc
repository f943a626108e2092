// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/block_mask_cache.h"

#include <exception>

namespace stof {

BlockMaskCache& BlockMaskCache::Global() {
  static auto* cache = new BlockMaskCache;  // never destroyed: kernels may outlive static destructors
  return *cache;
}

Status BlockMaskCache::Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
                           std::shared_ptr<const BlockMask>* mask) {
  // B and H matter only where the expression tells batches or heads apart.
  const Key key = {
      hash, expr.Uses(ExprOp::kB) ? sizes.B : 1, expr.Uses(ExprOp::kH) ? sizes.H : 1, sizes.S, sizes.T, sizes.P, m, n};
  {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      const auto found = slots_.find(key);
      if (found == slots_.end()) break;
      if (found->second.mask != nullptr) {
        ++stats_.hits;
        ages_.splice(ages_.begin(), ages_, found->second.age);
        *mask = found->second.mask;
        return Status();
      }
      built_.wait(lock);
    }
    ++stats_.misses;
    slots_.emplace(key, Slot{});
  }

  auto made = std::make_shared<BlockMask>();
  Status status;
  try {
    status = BuildBlockMask(expr, sizes, m, n, made.get());
  } catch (const std::exception& error) {  // the slot must not stay "being built" for ever
    status = Status::Error(std::string("a block mask could not be built: ") + error.what());
  }

  const std::lock_guard<std::mutex> lock(mutex_);
  built_.notify_all();
  if (!status.ok()) {
    slots_.erase(key);  // whoever waits tries again and meets the same error
    return status;
  }
  ++stats_.builds;
  Slot& slot = slots_[key];
  slot.mask = made;
  slot.bytes = made->Bytes();
  ages_.push_front(key);
  slot.age = ages_.begin();
  stats_.bytes += slot.bytes;
  Evict();
  *mask = std::move(made);
  return Status();
}

void BlockMaskCache::Evict() {
  while (stats_.bytes > capacity_ && !ages_.empty()) {
    const auto found = slots_.find(ages_.back());
    stats_.bytes -= found->second.bytes;
    slots_.erase(found);
    ages_.pop_back();
  }
}

BlockMaskCache::Stats BlockMaskCache::GetStats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  Stats stats = stats_;
  stats.entries = static_cast<int64_t>(ages_.size());
  return stats;
}

void BlockMaskCache::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Key& key : ages_) slots_.erase(key);
  ages_.clear();
  stats_ = Stats();
}

}  // namespace stof
