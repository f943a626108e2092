// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/stream_memory.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda/common/status.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
namespace {

// Whether the stream is being captured; no value where CUDA gives an error.
std::optional<bool> CaptureOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) return status != cudaStreamCaptureStatusNone;
  cudaGetLastError();
  return std::nullopt;
}

// The library's own memory pool of a device; nullptr where the device has none. The pool keeps unused memory up to
// 64 MiB, or up to the largest block that was requested: else every run would map it again.
cudaMemPool_t PoolOf(int device, size_t bytes) {
  constexpr int kDevices = 64;
  constexpr uint64_t kKept = uint64_t{64} << 20;
  static std::mutex mutex;
  static cudaMemPool_t pools[kDevices];
  static bool asked[kDevices];
  static uint64_t kept[kDevices];
  if (device < 0 || device >= kDevices) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!asked[device]) {
    asked[device] = true;
    int supported = 0;
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    props.location.id = device;
    kept[device] = kKept;
    const RelaxedCapture relaxed;
    if (cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, device) != cudaSuccess || supported == 0 ||
        cudaMemPoolCreate(&pools[device], &props) != cudaSuccess ||
        cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &kept[device]) != cudaSuccess) {
      cudaGetLastError();
      pools[device] = nullptr;
    }
  }
  if (pools[device] != nullptr && bytes > kept[device]) {
    kept[device] = bytes;
    const RelaxedCapture relaxed;
    if (cudaMemPoolSetAttribute(pools[device], cudaMemPoolAttrReleaseThreshold, &kept[device]) != cudaSuccess) {
      cudaGetLastError();
    }
  }
  return pools[device];
}

void Free(void* memory, cudaStream_t stream) {
  const RelaxedCapture relaxed;
  if (cudaFreeAsync(memory, stream) != cudaSuccess) cudaGetLastError();
}

// Blocks of a device that stay with the stream that used them last. Its next run takes one without a call of CUDA, of
// which an allocation needs six; the order of the stream keeps both runs apart. Nobody says when a stream ends: a block
// that was not used among the last kIdle ones gives way to one of another stream, once the device has done its work.
class KeptBlocks {
 public:
  static constexpr size_t kUnit = size_t{2} << 20;
  static constexpr size_t kLargest = size_t{16} << 20;

  // Those of a device; nullptr: nothing of it is kept.
  static KeptBlocks* Of(int device) {
    constexpr int kDevices = 64;
    static auto* const all =
        new std::array<KeptBlocks, kDevices>;  // never destroyed: threads may outlive static objects
    return device >= 0 && device < kDevices ? &(*all)[static_cast<size_t>(device)] : nullptr;
  }

  // The smallest free block of the stream that is large enough; nullptr: there is none.
  void* Take(unsigned long long stream, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Block* found = nullptr;
    for (Block& block : blocks_) {
      if (block.is_used || block.stream != stream || block.bytes < bytes) continue;
      if (found == nullptr || block.bytes < found->bytes) found = &block;
    }
    if (found == nullptr) return nullptr;
    found->is_used = true;
    found->last_use = ++uses_;
    return found->memory;
  }

  // Keeps a block that the stream uses now, if there is room. Smaller ones of the stream, and idle ones, make room.
  void Add(unsigned long long stream, cudaStream_t handle, void* memory, size_t bytes) {
    const auto is_smaller = [&](const Block& b) { return b.stream == stream && b.bytes < bytes; };
    for (void* block : Remove(is_smaller)) Free(block, handle);
    if (!HasRoom(bytes)) FreeIdle(handle);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kept_bytes_ + bytes > kMost) return;
    for (Block& block : blocks_) {  // each has a unit at least: one is left
      if (block.memory != nullptr) continue;
      block = {stream, memory, bytes, true, ++uses_};
      kept_bytes_ += bytes;
      return;
    }
  }

  // Whether the block stays with its stream; else it is to be freed.
  bool Give(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Block& block : blocks_) {
      if (block.memory != memory) continue;
      block.is_used = false;
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kMost = size_t{64} << 20;
  static constexpr uint64_t kIdle = 1 << 16;

  struct Block {
    unsigned long long stream = 0;
    void* memory = nullptr;
    size_t bytes = 0;
    bool is_used = false;
    uint64_t last_use = 0;  // by the number of uses of all blocks
  };

  bool HasRoom(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return kept_bytes_ + bytes <= kMost;
  }

  // Takes free blocks out of the table, to be freed.
  template <typename Which>
  std::vector<void*> Remove(const Which& which) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<void*> removed;
    for (Block& block : blocks_) {
      if (block.memory == nullptr || block.is_used || !which(block)) continue;
      removed.push_back(block.memory);
      kept_bytes_ -= block.bytes;
      block = Block();
    }
    return removed;
  }

  // The streams of idle blocks may have ended with work that uses them. Other threads do not wait here for the device.
  void FreeIdle(cudaStream_t handle) {
    uint64_t now = 0;
    const auto is_idle = [&now](const Block& b) {
      return b.memory != nullptr && !b.is_used && b.last_use + kIdle <= now;
    };
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      now = uses_;
      if (std::none_of(blocks_.begin(), blocks_.end(), is_idle)) return;
    }
    const RelaxedCapture relaxed;
    if (cudaDeviceSynchronize() != cudaSuccess) {
      cudaGetLastError();
      return;
    }
    for (void* block : Remove(is_idle)) Free(block, handle);
  }

  std::mutex mutex_;
  std::array<Block, kMost / kUnit> blocks_;
  size_t kept_bytes_ = 0;
  uint64_t uses_ = 0;
};

}  // namespace

bool AllocateAsync(void* stream, size_t bytes, void** memory) {
  *memory = nullptr;
  auto* const on = static_cast<cudaStream_t>(stream);
  int device = 0;
  unsigned long long number = 0;  // which no other stream of the process ever has
  if (IsCapturing(on)) return false;
  if (cudaGetDevice(&device) != cudaSuccess || cudaStreamGetId(on, &number) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  KeptBlocks* const kept = bytes <= KeptBlocks::kLargest ? KeptBlocks::Of(device) : nullptr;
  if (kept != nullptr) *memory = kept->Take(number, bytes);
  if (*memory != nullptr) return true;
  if (kept != nullptr) bytes = static_cast<size_t>(RoundUp(static_cast<int64_t>(bytes), int64_t{KeptBlocks::kUnit}));
  cudaMemPool_t pool = PoolOf(device, bytes);
  if (pool == nullptr) return false;
  const RelaxedCapture relaxed;
  if (cudaMallocFromPoolAsync(memory, bytes, pool, on) != cudaSuccess) {
    cudaGetLastError();
    *memory = nullptr;
  } else if (kept != nullptr) {
    kept->Add(number, on, *memory, bytes);
  }
  return true;
}

void FreeAsync(void* stream, void* memory) {
  int device = 0;
  KeptBlocks* const kept = cudaGetDevice(&device) == cudaSuccess ? KeptBlocks::Of(device) : nullptr;
  if (kept == nullptr || !kept->Give(memory)) Free(memory, static_cast<cudaStream_t>(stream));
}

bool IsCapturing(void* stream) { return CaptureOf(static_cast<cudaStream_t>(stream)).value_or(true); }

bool SynchronizeUnlessCapturing(void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  const std::optional<bool> captured = CaptureOf(on);
  if (captured.value_or(false)) return true;
  if (cudaStreamSynchronize(on) == cudaSuccess) return false;
  cudaGetLastError();
  return !captured.has_value();  // of unknown state: a stream that cannot be synchronized is captured
}

void CallInRelaxedCapture(void (*run)(void* self), void* self) {
  const RelaxedCapture relaxed;
  run(self);
}

Status UploadStream(cudaStream_t* stream) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static cudaStream_t streams[kDevices];
  int device = 0;
  STOF_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&device), "current device"));
  if (device >= kDevices) return Status::Error("more than 64 devices");
  const std::lock_guard<std::mutex> lock(mutex);
  if (streams[device] == nullptr) {
    STOF_RETURN_IF_ERROR(
        ToStatus(cudaStreamCreateWithFlags(&streams[device], cudaStreamNonBlocking), "stream for uploads"));
  }
  *stream = streams[device];
  return Status();
}

}  // namespace cuda
}  // namespace stof
