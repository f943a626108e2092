// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/host/fork_guard.h"

#include "plugins/core/host/platform.h"

namespace stof {
namespace {

std::atomic<uint64_t> generation{0};

// The atfork handler of the child: runs before fork() returns there, while it has one thread.
void CountFork() { generation.fetch_add(1, std::memory_order_relaxed); }

// When the library is loaded, thus before any of its state exists.
[[maybe_unused]] const bool is_registered = [] {
  CallInForkedChild(CountFork);
  return true;
}();

}  // namespace

uint64_t ForkGeneration() { return generation.load(std::memory_order_relaxed); }

}  // namespace stof
