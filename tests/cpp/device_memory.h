// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU for tests of operators.
#ifndef STOF_TESTS_CPP_DEVICE_MEMORY_H_
#define STOF_TESTS_CPP_DEVICE_MEMORY_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "tests/cpp/check.h"

namespace stof::test {

#define CHECK_CUDA(call)                                                 \
  do {                                                                   \
    const cudaError_t error = (call);                                    \
    CHECK(error == cudaSuccess, #call, ": ", cudaGetErrorString(error)); \
  } while (0)

// Copies to the device and waits until the bytes are there. cudaMemcpy alone returns earlier: up to 64 KiB of pageable
// memory are staged, and a stream that does not wait for the default stream may run before they arrive.
inline void CopyToDevice(void* to, const void* from, size_t bytes) {
  CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  CHECK_CUDA(cudaDeviceSynchronize());
}

// Device memory: blocks of their own, so that compute-sanitizer sees every access beyond, or one arena that a captured
// graph keeps.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t arena = 0) : arena_bytes_(arena) {
    if (arena > 0) CHECK_CUDA(cudaMalloc(&arena_, arena));
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() {
    cudaFree(arena_);
    for (void* block : blocks_) cudaFree(block);
  }
  void* Take(size_t bytes) {
    void* block = nullptr;
    CHECK_CUDA(cudaMalloc(&block, std::max<size_t>(bytes, 1)));
    blocks_.push_back(block);
    return block;
  }
  void* Upload(const void* from, size_t bytes) {
    void* const block = Take(bytes);
    CopyToDevice(block, from, bytes);
    return block;
  }
  // RunContext::allocate.
  static void* Allocate(void* self, size_t bytes) {
    auto& own = *static_cast<DeviceMemory*>(self);
    void* block = nullptr;
    if (own.arena_ == nullptr) {
      block = own.Take(bytes);
    } else if (own.used_ + bytes <= own.arena_bytes_) {
      block = static_cast<char*>(own.arena_) + own.used_;
      own.used_ += (bytes + 63) / 64 * 64;
    }
    own.workspace_.push_back(block);
    return block;
  }
  void ResetArena() { used_ = 0, workspace_.clear(); }
  // What the op allocated, in its order.
  const std::vector<void*>& workspace() const { return workspace_; }

 private:
  void* arena_ = nullptr;
  size_t arena_bytes_, used_ = 0;
  std::vector<void*> blocks_, workspace_;
};

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_DEVICE_MEMORY_H_
