// SPDX-License-Identifier: Apache-2.0
// Counts the memory that a run on the CPU takes from its runtime, for Op::PlanHost: an operator prepares a run with a
// context that counts, by the code that prepares real runs.
#ifndef STOF_PLUGINS_CORE_CONTRACT_WORKSPACE_COUNTER_H_
#define STOF_PLUGINS_CORE_CONTRACT_WORKSPACE_COUNTER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/op.h"

namespace stof {

// An address for tensors without data that nothing reads: aligned as memory of a runtime is.
constexpr uintptr_t kUnreadAddress = uintptr_t{1} << 20;
inline void* UnreadData() { return reinterpret_cast<void*>(kUnreadAddress); }

class WorkspaceCounter {
 public:
  // threads: of the run. What the context allocates must not be read or written. It must not outlive this.
  RunContext MakeContext(int threads) {
    RunContext context;
    context.parallel.threads = std::max(1, threads);
    context.allocate = [](void* self, size_t bytes) {
      size_t& total = static_cast<WorkspaceCounter*>(self)->bytes_;
      if (__builtin_add_overflow(total, bytes, &total)) total = SIZE_MAX;
      return UnreadData();
    };
    context.self = this;
    return context;
  }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_ = 0;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_WORKSPACE_COUNTER_H_
