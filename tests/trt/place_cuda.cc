// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "tests/cpp/check.h"
#include "tests/trt/place.h"

namespace stof::test {
namespace {

constexpr size_t kBand = 256;  // bytes on either side
constexpr unsigned char kUntouched = 0xcd;

void Expect(cudaError_t error, const char* what) { CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error)); }

// Poisons memory and waits for that alone: while a thread of the library captures its kernels, nobody may wait for the
// whole device.
void Poison(void* block, size_t bytes) {
  cudaStream_t stream = nullptr;
  Expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const cudaError_t set = cudaMemsetAsync(block, kUntouched, bytes, stream);
  const cudaError_t done = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  Expect(set, "poison");
  Expect(done, "poison");
}

}  // namespace

Seen* LastSeen() { return nullptr; }

// The address is a multiple of 64 and not of 128: kernels may not count on more than the plugin promises.
Memory::Memory(size_t bytes) : bytes_(bytes), host_(new char[std::max<size_t>(1, bytes)]) {
  void* block = nullptr;
  Expect(cudaMalloc(&block, bytes + 2 * kBand + 64), "memory");
  Poison(block, bytes + 2 * kBand + 64);
  address_ = static_cast<char*>(block) + kBand + 64;
  std::memset(host_, kUntouched, bytes);
}
Memory::~Memory() {
  if (host_ == nullptr) return;
  delete[] host_;
  cudaFree(static_cast<char*>(address_) - kBand - 64);
}
Memory::Memory(Memory&& other) noexcept : bytes_(other.bytes_), host_(other.host_), address_(other.address_) {
  other.host_ = nullptr;
}

void Memory::Upload(cudaStream_t stream) const {
  Expect(cudaMemcpyAsync(address_, host_, bytes_, cudaMemcpyHostToDevice, stream), "copy to the device");
  Expect(cudaStreamSynchronize(stream), "copy to the device");
}

void Memory::Download(cudaStream_t stream) const {
  std::vector<unsigned char> all(bytes_ + 2 * kBand);
  const char* from = static_cast<const char*>(address_) - kBand;
  Expect(cudaMemcpyAsync(all.data(), from, all.size(), cudaMemcpyDeviceToHost, stream), "copy from the device");
  Expect(cudaStreamSynchronize(stream), "work on the stream");
  std::memcpy(host_, all.data() + kBand, bytes_);
  for (size_t i = 0; i < kBand; ++i) {
    CHECK(all[i] == kUntouched, "byte ", kBand - i, " before memory of ", bytes_, " was written to");
    CHECK(all[kBand + bytes_ + i] == kUntouched, "byte ", i, " behind memory of ", bytes_, " was written to");
  }
}

cudaStream_t ThreadStream() {
  thread_local cudaStream_t stream = [] {
    cudaStream_t made = nullptr;
    Expect(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "stream");
    return made;
  }();
  return stream;
}

}  // namespace stof::test
