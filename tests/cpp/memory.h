// SPDX-License-Identifier: Apache-2.0
// Threads that get no memory.
#ifndef STOF_TESTS_CPP_MEMORY_H_
#define STOF_TESTS_CPP_MEMORY_H_

namespace stof::test {

// While it is set, `new` throws std::bad_alloc on this thread.
bool& MemoryIsRefused();

}  // namespace stof::test
#endif  // STOF_TESTS_CPP_MEMORY_H_
