// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tests/trt/place.h"

namespace stof::test {

Seen* LastSeen() {
  thread_local Seen seen;
  return &seen;
}

Memory::Memory(size_t bytes)
    : bytes_(bytes),
      host_(static_cast<char*>(std::aligned_alloc(64, std::max<size_t>(64, (bytes + 63) / 64 * 64)))),
      address_(host_) {
  std::memset(host_, 0xcd, bytes_);
}
Memory::~Memory() { std::free(host_); }
Memory::Memory(Memory&& other) noexcept : bytes_(other.bytes_), host_(other.host_), address_(other.address_) {
  other.host_ = nullptr;
}
void Memory::Upload(cudaStream_t) const {}
void Memory::Download(cudaStream_t) const {}

cudaStream_t ThreadStream() { return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(0x5eed)); }

}  // namespace stof::test
