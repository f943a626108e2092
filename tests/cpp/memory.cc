// SPDX-License-Identifier: Apache-2.0
#include "tests/cpp/memory.h"

#include <cstdlib>
#include <new>

namespace stof::test {

bool& MemoryIsRefused() {
  thread_local bool refused = false;
  return refused;
}

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
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return stof::test::MemoryIsRefused() ? nullptr : std::malloc(size == 0 ? 1 : size);
}
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
