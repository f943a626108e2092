// SPDX-License-Identifier: Apache-2.0
#include "plugins/ort/run_context.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "plugins/core/host/fork_guard.h"
#include "plugins/ort/errors.h"

namespace stof::ort {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kMaxThreads = 64;
// The block that small ones share, and the largest of those. The backend keeps 64 MiB of unused memory.
constexpr size_t kSharedBlock = size_t{2} << 20;
constexpr size_t kMostShared = size_t{1} << 20;

uintptr_t Align(uintptr_t address) { return (address + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

RunScratch::RunScratch(const OrtApi* api, const OrtKernelContext* context, const std::string& node, OrtAllocator* own)
    : api_(api), context_(context), node_(node), own_(own) {}

void RunScratch::UseDevice(void* stream) {
  backend_ = FindCudaBackend();
  stream_ = stream;
}

RunScratch::~RunScratch() {
  for (void* block : ordered_) backend_->free_async(stream_, block);
  // Without stream-ordered memory the arena gets its blocks back when the stream is done.
  if (!blocks_.empty() && backend_ != nullptr) backend_->synchronize_unless_capturing(stream_);
  for (void* block : blocks_) HasFailed(api_, api_->AllocatorFree(arena_, block));
  if (arena_ != nullptr && arena_ != own_) api_->ReleaseAllocator(arena_);
  if (status_ != nullptr) api_->ReleaseStatus(status_);
}

OrtStatus* RunScratch::TakeStatus() { return std::exchange(status_, nullptr); }

void* RunScratch::Allocate(void* self, size_t bytes) {
  auto* scratch = static_cast<RunScratch*>(self);
  void* block = nullptr;
  bytes = std::max<size_t>(bytes, 1);  // nullptr says that there is no memory
  if (scratch->backend_ == nullptr) {
    block = scratch->FromArena(bytes + kAlignment);
  } else if (bytes <= scratch->shared_left_) {
    block = reinterpret_cast<void*>(scratch->shared_);
    const uintptr_t next = Align(scratch->shared_ + bytes);
    scratch->shared_left_ -= std::min<size_t>(scratch->shared_left_, next - scratch->shared_);
    scratch->shared_ = next;
    return block;
  } else if (!scratch->FromStream(bytes, &block)) {
    // An arena that grows while a graph is captured allocates.
    struct Call {
      RunScratch* scratch;
      size_t bytes;
      void* block;
    } call{scratch, bytes + kAlignment, nullptr};
    scratch->backend_->call_in_relaxed_capture(
        [](void* c) {
          static_cast<Call*>(c)->block = static_cast<Call*>(c)->scratch->FromArena(static_cast<Call*>(c)->bytes);
        },
        &call);
    block = call.block;
  }
  return reinterpret_cast<void*>(Align(reinterpret_cast<uintptr_t>(block)));
}

bool RunScratch::FromStream(size_t bytes, void** block) {
  const bool is_shared = bytes <= kMostShared;
  if (!backend_->allocate_async(stream_, is_shared ? kSharedBlock : bytes + kAlignment, block)) return false;
  if (*block == nullptr) return true;
  ordered_.push_back(*block);
  if (is_shared) {
    const uintptr_t begin = Align(reinterpret_cast<uintptr_t>(*block));
    shared_ = Align(begin + bytes);
    shared_left_ = reinterpret_cast<uintptr_t>(*block) + kSharedBlock - shared_;
  }
  return true;
}

OrtStatus* RunScratch::FindArena() {
  OrtMemoryInfo* memory = nullptr;
  if (backend_ != nullptr) {
    int device = 0;
    STOF_ORT_RETURN(ToOrt(api_, node_, backend_->current_device(&device)));
    STOF_ORT_RETURN(api_->CreateMemoryInfo("Cuda", OrtArenaAllocator, device, OrtMemTypeDefault, &memory));
  } else {
    STOF_ORT_RETURN(api_->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  }
  OrtStatus* status = api_->KernelContext_GetAllocator(context_, memory, &arena_);
  api_->ReleaseMemoryInfo(memory);
  // A plugin provider may name its memory otherwise: then take the allocator from the kernel's creation.
  if (status != nullptr && own_ != nullptr) {
    api_->ReleaseStatus(status);
    status = nullptr;
    arena_ = own_;
  }
  return status;
}

void* RunScratch::FromArena(size_t bytes) {
  if (arena_ == nullptr && status_ == nullptr) status_ = FindArena();
  void* block = nullptr;
  if (arena_ == nullptr || HasFailed(api_, api_->AllocatorAlloc(arena_, bytes, &block)) || block == nullptr) {
    return nullptr;
  }
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
