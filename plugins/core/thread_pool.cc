// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/thread_pool.h"

#include <stdexcept>
#include <string>

namespace stof {

ThreadPool::ThreadPool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { Work(); });
  } catch (const std::exception&) {
    const size_t started = workers_.size();
    Stop();  // a thread that is destroyed while it runs ends the process
    throw std::runtime_error("the system gave " + std::to_string(started + 1) + " of " + std::to_string(threads) +
                             " threads: ask for fewer, or raise the limit of threads or memory");
  }
}

ThreadPool::~ThreadPool() { Stop(); }

void ThreadPool::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Takes indices until none is left. Kernels hand out one index for each slot, so the lock is taken a few times a run.
void ThreadPool::Drain(std::unique_lock<std::mutex>* lock) {
  while (next_ < count_) {
    const size_t index = next_++;
    const auto fn = fn_;
    void* const user = user_;
    lock->unlock();
    fn(user, index);
    lock->lock();
    if (--unfinished_ == 0) done_.notify_all();
  }
}

void ThreadPool::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || next_ < count_; });
    if (stop_) return;
    Drain(&lock);
  }
}

void ThreadPool::Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
  auto& pool = *static_cast<ThreadPool*>(self);
  if (pool.workers_.empty() || count == 1) {
    for (size_t i = 0; i < count; ++i) fn(user, i);
    return;
  }
  std::unique_lock<std::mutex> lock(pool.mutex_);
  pool.fn_ = fn;
  pool.user_ = user;
  pool.next_ = 0;
  pool.count_ = count;
  pool.unfinished_ = count;
  pool.wake_.notify_all();
  pool.Drain(&lock);
  pool.done_.wait(lock, [&pool] { return pool.unfinished_ == 0; });
  pool.count_ = 0;
}

}  // namespace stof
