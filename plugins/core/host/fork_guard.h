// SPDX-License-Identifier: Apache-2.0
// Fork safety: state that a child of fork() can use, by way of a pthread_atfork handler. The child has a copy of all
// memory but only the thread that forked. Work of other threads stays half done, and locks that they held are never
// released.
#ifndef STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_
#define STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace stof {

// The number of forks between the process that loaded the library and this one. Work that was begun in another
// generation is never finished in this process: its thread is not here.
uint64_t ForkGeneration();

// A singleton that is initialized lazily, without a lock, and never destroyed: threads may outlive static objects.
// Declare it `static ProcessWide<T> name;`, which needs no initialization at run time. Threads that race to be first
// each make a value; one is kept. A function-local static with an initializer has a lock: after a fork during the
// initialization the child would wait for a thread that it does not have.
template <typename T>
class ProcessWide {
 public:
  constexpr ProcessWide() = default;
  template <typename Make>
  T& Get(Make make) {
    T* value = value_.load(std::memory_order_acquire);
    if (value != nullptr) return *value;
    std::unique_ptr<T> made(new T(make()));
    if (value_.compare_exchange_strong(value, made.get(), std::memory_order_acq_rel, std::memory_order_acquire)) {
      return *made.release();
    }
    return *value;
  }
  T& Get() {
    return Get([] { return T(); });
  }

 private:
  std::atomic<T*> value_{nullptr};
};

// A value behind a mutex. In a child of fork() the mutex is unlocked. The value is what it was, or a new T if another
// thread held the mutex at the fork. The old value is then leaked: it may be half changed.
template <typename T>
class ForkSafe {
 public:
  ForkSafe() : generation_(ForkGeneration()) { new (&memory_) T(); }
  ForkSafe(const ForkSafe&) = delete;
  ForkSafe& operator=(const ForkSafe&) = delete;
  ~ForkSafe() {
    if (!is_locked_ || generation_.load(std::memory_order_relaxed) == ForkGeneration()) value()->~T();
  }

  // The value, for as long as the Access lives. Not recursive.
  class Access {
   public:
    explicit Access(ForkSafe* owner) : owner_(owner) { owner_->Acquire(); }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;
    ~Access() { owner_->Release(); }
    T* operator->() const { return owner_->value(); }
    T& operator*() const { return *owner_->value(); }

   private:
    ForkSafe* owner_;
  };
  Access Lock() { return Access(this); }

 private:
  static constexpr uint64_t kResetting = uint64_t{1} << 63;

  T* value() { return std::launder(reinterpret_cast<T*>(&memory_)); }
  void Acquire() {
    const uint64_t now = ForkGeneration();
    for (uint64_t seen = generation_.load(std::memory_order_acquire); seen != now;) {
      if (seen == (now | kResetting)) {  // another thread of this process resets it
        std::this_thread::yield();
        seen = generation_.load(std::memory_order_acquire);
      } else if (generation_.compare_exchange_weak(seen, now | kResetting, std::memory_order_acq_rel,
                                                   std::memory_order_acquire)) {
        Reset((seen & kResetting) != 0);
        generation_.store(seen = now, std::memory_order_release);
      }
    }
    mutex_.lock();
    is_locked_ = true;
  }
  void Release() {
    is_locked_ = false;
    mutex_.unlock();
  }
  void Reset(bool was_resetting) {
    new (&mutex_) std::mutex;
    if (is_locked_ || was_resetting) new (&memory_) T();
    is_locked_ = false;
  }

  std::mutex mutex_;
  bool is_locked_ = false;  // a thread holds the mutex
  std::atomic<uint64_t> generation_;
  alignas(T) unsigned char memory_[sizeof(T)];
};

// A resource that only the first process to use it may use, such as a CUDA context. Children forked later may not.
class SingleProcess {
 public:
  constexpr SingleProcess() = default;
  // Whether this process may use it: the first to ask may, its children may not.
  bool Claim() {
    const uint64_t own = ForkGeneration() + 1;
    uint64_t first = 0;
    return first_.compare_exchange_strong(first, own, std::memory_order_acq_rel) || first == own;
  }

 private:
  std::atomic<uint64_t> first_{0};  // one more than a generation; 0: nobody yet
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_
