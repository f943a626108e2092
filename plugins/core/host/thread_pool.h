// SPDX-License-Identifier: Apache-2.0
// The threads behind the C ABI. Runtimes bring their own; this one serves tests, benchmarks and the tuner.
#ifndef STOF_PLUGINS_CORE_HOST_THREAD_POOL_H_
#define STOF_PLUGINS_CORE_HOST_THREAD_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/core/base/types.h"
#include "plugins/core/host/fork_guard.h"

namespace stof {

// A fixed team of threads - 1 workers and the caller. One Run at a time. A child of fork() has none of the workers:
// there the caller does all of the work, and the destructor waits for nobody. Nor does it on Windows, where workers end
// by themselves.
class ThreadPool {
 public:
  // Throws where the system gives no more threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  Parallel view() { return {&ThreadPool::Run, this, threads_}; }
  // Whether this process was forked after the workers started.
  bool IsOfAnotherProcess() const { return generation_ != ForkGeneration(); }

 private:
  // State that the workers share. A child of fork() leaves it alone: it can neither join the threads nor destroy the
  // condition variables that they wait for.
  struct Team {
    std::mutex mutex;
    std::condition_variable wake;
    std::condition_variable done;
    void (*fn)(void*, size_t) = nullptr;
    void* user = nullptr;
    size_t next = 0;
    size_t count = 0;
    size_t unfinished = 0;
    bool stop = false;
    std::vector<std::thread> workers;

    void Work();
    void Drain(std::unique_lock<std::mutex>* lock);
    void Stop();
  };
  static void Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user);

  const uint64_t generation_ = ForkGeneration();
  const int threads_;
  std::shared_ptr<Team> team_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_THREAD_POOL_H_
