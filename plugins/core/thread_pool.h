// SPDX-License-Identifier: Apache-2.0
// The threads behind the C ABI. Runtimes bring their own; this one serves tests, benchmarks and the tuner.
#ifndef STOF_PLUGINS_CORE_THREAD_POOL_H_
#define STOF_PLUGINS_CORE_THREAD_POOL_H_

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/core/kernels.h"

namespace stof {

// A fixed team of threads - 1 workers and the caller. One Run at a time.
class ThreadPool {
 public:
  // Throws where the system gives no more threads.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  Parallel view() { return {&ThreadPool::Run, this, static_cast<int>(workers_.size()) + 1}; }

 private:
  static void Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user);
  void Work();
  void Stop();
  void Drain(std::unique_lock<std::mutex>* lock);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  void (*fn_)(void*, size_t) = nullptr;
  void* user_ = nullptr;
  size_t next_ = 0;
  size_t count_ = 0;
  size_t unfinished_ = 0;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_THREAD_POOL_H_
