// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/mask/block_mask_cache.h"

#include <exception>
#include <string>
#include <utility>

namespace stof {
namespace {

constexpr int64_t kSlotBytes = 512;  // of an entry beside its mask, about

}  // namespace

uint64_t BlockMaskKey::Hash() const {
  return HashWords({sizes.Hash(), static_cast<uint64_t>(m), static_cast<uint64_t>(n), leaves_tiles ? 1u : 0u},
                   expression);
}

std::string BlockMaskKey::Print() const {
  return "expression " + std::to_string(expression) + " " + sizes.Print() + " tile " + std::to_string(m) + "x" +
         std::to_string(n) + (leaves_tiles ? " leaves tiles" : "");
}

BlockMaskCache& BlockMaskCache::Global() {
  static ProcessWide<BlockMaskCache> cache;
  return cache.Get();
}

BlockMaskCache::Key BlockMaskCache::KeyOf(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
                                          bool leaves_tiles) {
  Key key;
  key.expression = hash;
  key.sizes = sizes;
  if (!expr.Uses(ExprOp::kB)) key.sizes.B = 1;
  if (!expr.Uses(ExprOp::kH)) key.sizes.H = 1;
  key.m = m, key.n = n;
  key.leaves_tiles = leaves_tiles;
  return key;
}

Status BlockMaskCache::Get(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
                           const BlockMaskBounds& bounds, std::shared_ptr<const BlockMask>* mask) {
  return GetByKey(KeyOf(expr, hash, sizes, m, n, bounds.leaves_tiles), expr, sizes, m, n, bounds, mask);
}

Status BlockMaskCache::GetByKey(const Key& key, const MaskExpr& expr, const ExprSizes& sizes, int m, int n,
                                const BlockMaskBounds& bounds, std::shared_ptr<const BlockMask>* mask) {
  std::shared_ptr<Build> build;
  bool begun = false;
  STOF_RETURN_IF_ERROR(FindOrBegin(key, &build, &begun, mask));
  if (build == nullptr) return Status();
  if (begun) STOF_RETURN_IF_ERROR(BuildAndStore(key, expr, sizes, m, n, bounds, build.get()));
  return build->Wait(mask);
}

// Gives the mask, or a build: one to wait for, or a new one (begun), which the caller has to end.
Status BlockMaskCache::FindOrBegin(const Key& key, std::shared_ptr<Build>* build, bool* begun,
                                   std::shared_ptr<const BlockMask>* mask) {
  const auto state = state_.Lock();
  auto found = state->slots.find(key);
  // A child of fork() does not have the parent's building threads.
  if (found != state->slots.end() && found->second.build != nullptr &&
      found->second.build->generation != ForkGeneration()) {
    state->slots.erase(found);
    found = state->slots.end();
  }
  if (found == state->slots.end()) {
    auto made = std::make_shared<Build>();
    state->slots[key].build = made;
    ++state->stats.misses;
    *build = std::move(made);
    *begun = true;
    return Status();
  }
  ++state->stats.hits;
  const Slot& slot = found->second;
  *build = slot.build;
  if (slot.build != nullptr) return Status();
  state->ages.splice(state->ages.begin(), state->ages, slot.age);
  *mask = slot.mask;
  return slot.too_large;
}

// Wakes all waiting callers in any case, and removes a slot without a result.
Status BlockMaskCache::BuildAndStore(const Key& key, const MaskExpr& expr, const ExprSizes& sizes, int m, int n,
                                     const BlockMaskBounds& bounds, Build* build) {
  Finished made;
  try {
    made.age.push_back(key);
    auto mask = std::make_shared<BlockMask>();
    made.status = BuildBlockMask(expr, sizes, m, n, mask.get(), bounds);
    made.status_of_slot = made.status;
    if (made.status.ok()) made.mask = std::move(mask);
  } catch (const std::exception& error) {
    End(key, nullptr, build);
    return Status::Error(std::string("a block mask could not be built: ") + error.what());
  } catch (...) {
    End(key, nullptr, build);
    throw;
  }
  End(key, &made, build);
  return Status();
}

void BlockMaskCache::End(const Key& key, Finished* made, Build* build) noexcept {
  {
    const auto state = state_.Lock();
    const auto found = state->slots.find(key);
    // Another build in the slot: this process was forked while the build ran.
    const bool own = found != state->slots.end() && found->second.build.get() == build;
    if (made != nullptr && made->status.ok()) ++state->stats.builds;
    if (own && (made == nullptr || !(made->status.ok() || made->status.too_large()))) {
      state->slots.erase(found);  // the next caller tries again
    } else if (own) {
      Slot& slot = found->second;
      slot.build.reset();
      slot.mask = made->mask;
      slot.too_large = std::move(made->status_of_slot);
      slot.bytes = kSlotBytes + (made->mask == nullptr ? 0 : made->mask->Bytes());
      slot.age = made->age.begin();
      state->ages.splice(state->ages.begin(), made->age);
      state->stats.bytes += slot.bytes;
      Evict(&*state);
    }
  }
  build->End(made);
}

void BlockMaskCache::Build::End(Finished* made) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    if (made != nullptr) mask = std::move(made->mask), status = std::move(made->status);
    done = true;
  }
  ended.notify_all();
}

Status BlockMaskCache::Build::Wait(std::shared_ptr<const BlockMask>* result) {
  std::unique_lock<std::mutex> lock(mutex);
  ended.wait(lock, [this] { return done; });
  if (mask == nullptr && status.ok()) return Status::Error("another thread had no memory to build the block mask");
  *result = mask;
  return status;
}

void BlockMaskCache::Evict(State* state) const {
  for (auto age = state->ages.end(); state->stats.bytes > capacity_ && age != state->ages.begin();) {
    --age;
    const auto found = state->slots.find(*age);
    // A mask that somebody reads would not free its memory, and would no longer be counted.
    if (age == state->ages.begin() || found->second.mask.use_count() > 1) continue;
    state->stats.bytes -= found->second.bytes;
    state->slots.erase(found);
    age = state->ages.erase(age);
  }
}

Status BlockMaskCache::GetToKeep(const MaskExpr& expr, uint64_t hash, const ExprSizes& sizes, int m, int n,
                                 const BlockMaskBounds& bounds, std::shared_ptr<const BlockMask>* mask) {
  const Key key = KeyOf(expr, hash, sizes, m, n, bounds.leaves_tiles);
  std::shared_ptr<const BlockMask> shared;
  STOF_RETURN_IF_ERROR(GetByKey(key, expr, sizes, m, n, bounds, &shared));
  mask->reset();
  const auto state = state_.Lock();
  const auto found = state->slots.find(key);
  if (found == state->slots.end() || found->second.mask != shared) return Status();
  *mask = found->second.kept.lock();
  if (*mask != nullptr || KeptBytes(*state) + found->second.bytes > capacity_ / 2) return Status();
  *mask = std::shared_ptr<const BlockMask>(shared.get(), [shared](const BlockMask*) {});
  found->second.kept = *mask;
  return Status();
}

int64_t BlockMaskCache::KeptBytes(const State& state) {
  int64_t bytes = 0;
  for (const auto& [key, slot] : state.slots) bytes += slot.kept.expired() ? 0 : slot.bytes;
  return bytes;
}

BlockMaskCache::Stats BlockMaskCache::GetStats() const {
  const auto state = state_.Lock();
  Stats stats = state->stats;
  stats.entries = static_cast<int64_t>(state->ages.size());
  stats.kept_bytes = KeptBytes(*state);
  return stats;
}

void BlockMaskCache::Clear() {
  const auto state = state_.Lock();
  for (const Key& key : state->ages) state->slots.erase(key);
  state->ages.clear();
  state->stats = Stats();
}

}  // namespace stof
