// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/host/thread_pool.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "plugins/core/host/platform.h"

namespace stof {
namespace {

// A pool may be a thread's own, and be destroyed as the thread ends. Windows holds the loader lock then, and a worker
// needs it to end: who waits for workers there waits forever. So they own the team, too, and the library stays loaded.
#if defined(_WIN32)
constexpr bool kWaitsForWorkers = false;
#else
constexpr bool kWaitsForWorkers = true;
void KeepLibraryLoaded() {}
#endif

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(std::max(1, threads)), team_(std::make_shared<Team>()) {
  Team* const team = team_.get();
  const std::shared_ptr<Team> shared = kWaitsForWorkers ? nullptr : team_;
  if (!kWaitsForWorkers && threads > 1) KeepLibraryLoaded();
  try {
    for (int i = 1; i < threads; ++i) team->workers.emplace_back([team, shared] { team->Work(); });
  } catch (const std::exception&) {
    const size_t started = team->workers.size();
    team->Stop();  // a thread that is destroyed while it runs ends the process
    throw std::runtime_error("the system gave " + std::to_string(started + 1) + " of " + std::to_string(threads) +
                             " threads: ask for fewer, or raise the limit of threads or memory");
  }
}

ThreadPool::~ThreadPool() {
  if (IsOfAnotherProcess()) {
    (void)new std::shared_ptr<Team>(std::move(team_));  // never destroyed
  } else {
    team_->Stop();
  }
}

void ThreadPool::Team::Stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex);
    stop = true;
  }
  wake.notify_all();
  for (std::thread& worker : workers) {
    if (kWaitsForWorkers) {
      worker.join();
    } else {
      worker.detach();
    }
  }
}

// Takes indices until none is left. Kernels hand out one index for each slot, so the lock is taken a few times a run.
void ThreadPool::Team::Drain(std::unique_lock<std::mutex>* lock) {
  while (next < count) {
    const size_t index = next++;
    const auto own_fn = fn;
    void* const own_user = user;
    lock->unlock();
    own_fn(own_user, index);
    lock->lock();
    if (--unfinished == 0) done.notify_all();
  }
}

void ThreadPool::Team::Work() {
  std::unique_lock<std::mutex> lock(mutex);
  for (;;) {
    wake.wait(lock, [this] { return stop || next < count; });
    if (stop) return;
    Drain(&lock);
  }
}

void ThreadPool::Run(void* self, void (*fn)(void* user, size_t i), size_t count, void* user) {
  const auto& pool = *static_cast<const ThreadPool*>(self);
  if (pool.threads_ == 1 || count == 1 || pool.IsOfAnotherProcess()) {
    for (size_t i = 0; i < count; ++i) fn(user, i);
    return;
  }
  Team& team = *pool.team_;
  std::unique_lock<std::mutex> lock(team.mutex);
  team.fn = fn;
  team.user = user;
  team.next = 0;
  team.count = count;
  team.unfinished = count;
  team.wake.notify_all();
  team.Drain(&lock);
  team.done.wait(lock, [&team] { return team.unfinished == 0; });
  team.count = 0;
}

}  // namespace stof
