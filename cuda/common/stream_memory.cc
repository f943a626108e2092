// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/stream_memory.h"

#include <cstdint>
#include <mutex>
#include <optional>

#include "cuda/common/status.h"

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

// A stream whose state is unknown counts as captured: its memory is never shared.
bool IsCaptured(cudaStream_t stream) { return CaptureOf(stream).value_or(true); }

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

}  // namespace

bool Take(void* stream, size_t bytes, void** memory) {
  *memory = nullptr;
  auto* const on = static_cast<cudaStream_t>(stream);
  int device = 0;
  if (IsCaptured(on)) return false;
  if (cudaGetDevice(&device) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  cudaMemPool_t pool = PoolOf(device, bytes);
  if (pool == nullptr) return false;
  const RelaxedCapture relaxed;
  if (cudaMallocFromPoolAsync(memory, bytes, pool, on) != cudaSuccess) {
    cudaGetLastError();
    *memory = nullptr;
  }
  return true;
}

void Give(void* stream, void* memory) {
  const RelaxedCapture relaxed;
  if (cudaFreeAsync(memory, static_cast<cudaStream_t>(stream)) != cudaSuccess) cudaGetLastError();
}

bool Captured(void* stream) { return IsCaptured(static_cast<cudaStream_t>(stream)); }

bool CapturedOrDone(void* stream) {
  auto* const on = static_cast<cudaStream_t>(stream);
  const std::optional<bool> captured = CaptureOf(on);
  if (captured.value_or(false)) return true;
  if (cudaStreamSynchronize(on) == cudaSuccess) return false;
  cudaGetLastError();
  return !captured.has_value();  // of unknown state: a stream that cannot be synchronized is captured
}

void Relaxed(void (*run)(void* self), void* self) {
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
