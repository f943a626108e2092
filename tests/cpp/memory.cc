// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/memory.h"

#include <cstdlib>
#include <new>

namespace stof::test {

bool& MemoryIsRefused() {
  thread_local bool refused = false;
  return refused;
}

int64_t& AllocationsLeft() {
  thread_local int64_t left = -1;
  return left;
}

std::function<void(size_t bytes)>& OnAllocation() {
  thread_local std::function<void(size_t bytes)> call;
  return call;
}

namespace {

bool IsRefused(size_t bytes) {
  if (const auto& call = OnAllocation()) call(bytes);
  if (MemoryIsRefused()) return true;
  int64_t& left = AllocationsLeft();
  if (left <= 0) return left == 0;
  --left;
  return false;
}

}  // namespace

void* Allocate(size_t bytes) noexcept { return IsRefused(bytes) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes); }

void Starved::Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
  struct Call {
    void (*fn)(void* user, size_t i);
    void* user;
  } call = {fn, user};
  const auto starved = [](void* own, size_t i) {
    const auto& asked = *static_cast<const Call*>(own);
    MemoryIsRefused() = true;
    asked.fn(asked.user, i);
    MemoryIsRefused() = false;
  };
  const Parallel& team = static_cast<Starved*>(self)->team_;
  team.run(team.self, starved, count, &call);
}

}  // namespace stof::test

// In place of the library's, for the whole test program: all forms but those with an alignment.
// AddressSanitizer has each of its own and knows which made a block, so none may be left out.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept { return stof::test::Allocate(size); }
void* operator new(std::size_t size) {
  void* const block = operator new(size, std::nothrow);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept { return operator new(size, std::nothrow); }
void* operator new[](std::size_t size) { return operator new(size); }
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, const std::nothrow_t&) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, const std::nothrow_t&) noexcept { std::free(block); }
