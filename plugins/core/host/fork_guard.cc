// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/host/fork_guard.h"

#include <pthread.h>

namespace stof {
namespace {

std::atomic<uint64_t> generation{0};

// The atfork handler of the child: runs before fork() returns there, while it has one thread.
void CountFork() { generation.fetch_add(1, std::memory_order_relaxed); }

// When the library is loaded, thus before any of its state exists. Without memory for it nothing else would work.
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, CountFork);

}  // namespace

uint64_t ForkGeneration() { return generation.load(std::memory_order_relaxed); }

}  // namespace stof
