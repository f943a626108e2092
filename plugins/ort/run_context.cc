// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/run_context.h"

#include <algorithm>
#include <cstdint>
#include <thread>

#include "plugins/core/host/fork_guard.h"
#include "plugins/ort/errors.h"

namespace stof::ort {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kMaxThreads = 64;

}  // namespace

RunScratch::RunScratch(const OrtApi* api, OrtAllocator* allocator, bool on_device, void* stream)
    : api_(api), allocator_(allocator), backend_(on_device ? FindCudaBackend() : nullptr), stream_(stream) {}

RunScratch::~RunScratch() {
  for (void* block : ordered_) backend_->free_async(stream_, block);
  // Without stream-ordered memory the arena gets its blocks back when the stream is done.
  if (!blocks_.empty() && backend_ != nullptr) backend_->synchronize_unless_capturing(stream_);
  for (void* block : blocks_) HasFailed(api_, api_->AllocatorFree(allocator_, block));
}

void* RunScratch::Allocate(void* self, size_t bytes) {
  auto* scratch = static_cast<RunScratch*>(self);
  void* block = nullptr;
  bytes += kAlignment;
  if (scratch->backend_ == nullptr) {
    block = scratch->FromArena(bytes);
  } else if (scratch->backend_->allocate_async(scratch->stream_, bytes, &block)) {
    if (block != nullptr) scratch->ordered_.push_back(block);
  } else {
    // An arena that grows while a graph is captured allocates.
    struct Call {
      RunScratch* scratch;
      size_t bytes;
      void* block;
    } call{scratch, bytes, nullptr};
    scratch->backend_->call_in_relaxed_capture(
        [](void* c) {
          static_cast<Call*>(c)->block = static_cast<Call*>(c)->scratch->FromArena(static_cast<Call*>(c)->bytes);
        },
        &call);
    block = call.block;
  }
  const auto address = reinterpret_cast<uintptr_t>(block);
  return reinterpret_cast<void*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

void* RunScratch::FromArena(size_t bytes) {
  void* block = nullptr;
  if (HasFailed(api_, api_->AllocatorAlloc(allocator_, bytes, &block)) || block == nullptr) return nullptr;
  blocks_.push_back(block);
  return block;
}

int RunThreads() {
  static ProcessWide<const int> threads;
  return threads.Get(
      [] { return static_cast<int>(std::clamp<unsigned>(std::thread::hardware_concurrency(), 1, kMaxThreads)); });
}

void RunOnPool(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
  auto* pool = static_cast<Pool*>(self);
  if (count == 0) return;
  if (count == 1) return fn(user, 0);
  OrtStatus* status = pool->api->KernelContext_ParallelFor(pool->context, fn, count, 0, user);
  if (status == nullptr) return;
  if (pool->status == nullptr) {
    pool->status = status;
  } else {
    pool->api->ReleaseStatus(status);
  }
}

}  // namespace stof::ort
