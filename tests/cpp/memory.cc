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

// In place of the library's, for the whole test program; those of arrays come here, too.
void* operator new(std::size_t size) {
  void* const block = stof::test::MemoryIsRefused() ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
