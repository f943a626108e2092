// SPDX-License-Identifier: Apache-2.0
// State that a child of fork() can use. The child has one thread, the one that forked, and a copy of all memory: the
// work of other threads stays half done there, and a lock that another thread held is never released.
#ifndef STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_
#define STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace stof {

// The number of forks between the process that loaded the library and this one. Work that a thread of another
// generation has begun is never finished in this process.
uint64_t ForkGeneration();

// A value that the process makes once, when it is first asked for, and never destroys: threads may outlive static
// objects. A function-local static with an initializer would not do: after a fork during the initialization the child
// waits for a thread that it does not have. Declare it `static ProcessWide<T> name;`, which needs no initialization at
// run time. Two threads that ask first both make a value; one of the two is dropped.
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

// A value behind a mutex. In a child of fork() the mutex is free, and the value is what it was; but a new T where a
// thread that the child does not have was changing it. The old one is then left alone, without its destructor.
template <typename T>
class ForkSafe {
 public:
  ForkSafe() : generation_(ForkGeneration()) { new (&memory_) T(); }
  ForkSafe(const ForkSafe&) = delete;
  ForkSafe& operator=(const ForkSafe&) = delete;
  ~ForkSafe() {
    if (!changing_ || generation_.load(std::memory_order_relaxed) == ForkGeneration()) value()->~T();
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
  static constexpr uint64_t kRenewing = uint64_t{1} << 63;

  T* value() { return std::launder(reinterpret_cast<T*>(&memory_)); }
  void Acquire() {
    const uint64_t now = ForkGeneration();
    for (uint64_t seen = generation_.load(std::memory_order_acquire); seen != now;) {
      if (seen == (now | kRenewing)) {  // by another thread of this process
        std::this_thread::yield();
        seen = generation_.load(std::memory_order_acquire);
      } else if (generation_.compare_exchange_weak(seen, now | kRenewing, std::memory_order_acq_rel,
                                                   std::memory_order_acquire)) {
        Renew((seen & kRenewing) != 0);
        generation_.store(seen = now, std::memory_order_release);
      }
    }
    mutex_.lock();
    changing_ = true;
  }
  void Release() {
    changing_ = false;
    mutex_.unlock();
  }
  void Renew(bool half_renewed) {
    new (&mutex_) std::mutex;
    if (changing_ || half_renewed) new (&memory_) T();
    changing_ = false;
  }

  std::mutex mutex_;
  bool changing_ = false;  // somebody holds the mutex
  std::atomic<uint64_t> generation_;
  alignas(T) unsigned char memory_[sizeof(T)];
};

// A resource of the first process that uses it, such as a CUDA context: children that are forked later cannot use it.
class SingleProcess {
 public:
  constexpr SingleProcess() = default;
  // False in a child of the first process.
  bool Enter() {
    const uint64_t own = ForkGeneration() + 1;
    uint64_t first = 0;
    return first_.compare_exchange_strong(first, own, std::memory_order_acq_rel) || first == own;
  }

 private:
  std::atomic<uint64_t> first_{0};  // one more than a generation; 0: nobody yet
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_HOST_FORK_GUARD_H_
