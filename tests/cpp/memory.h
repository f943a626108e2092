// SPDX-License-Identifier: Apache-2.0
// Threads that get no memory, as a pool's threads may: what they run is called from C, where an exception ends the
// process, so kernels have all memory before.
#ifndef STOF_TESTS_CPP_MEMORY_H_
#define STOF_TESTS_CPP_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "plugins/core/base/types.h"

namespace stof::test {

// While it is set, `new` throws std::bad_alloc on this thread.
bool& MemoryIsRefused();

// The next allocations of this thread: `left` of them succeed, those after that fail while it is not negative.
int64_t& AllocationsLeft();

// Called with the size of every allocation of this thread while it is set.
std::function<void(size_t bytes)>& OnAllocation();

// The threads of another team, without memory while they run what they are given.
class Starved {
 public:
  explicit Starved(Parallel team) : team_(team) {}
  Parallel view() { return {&Starved::Run, this, team_.threads}; }

 private:
  static void Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user);
  Parallel team_;
};

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_MEMORY_H_
