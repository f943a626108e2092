// SPDX-License-Identifier: Apache-2.0
// In place of the header of the CUDA toolkit: device functions of one CTA run on the host, a thread for each of its
// threads. Only code whose warps call the same warp functions in the same order works.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

struct uint3 {
  unsigned x, y, z;
};
inline thread_local uint3 threadIdx = {0, 0, 0};

namespace stof::test::emulated_cta {

// Waits for so many threads.
class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    if (++arrived_ == count_) {
      arrived_ = 0, ++turn_;
      all_.notify_all();
      return;
    }
    all_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  const int count_;
  std::mutex mutex_;
  std::condition_variable all_;
  int arrived_ = 0;
  int64_t turn_ = 0;
};

struct Warp {
  Barrier barrier{32};
  uint32_t slots[32] = {};
};

class Cta {
 public:
  // Runs a function in each of `threads` threads, a multiple of 32.
  static void Run(int threads, const std::function<void()>& function) {
    Cta cta(threads);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) {
      running.emplace_back([&cta, &function, thread] {
        threadIdx.x = static_cast<unsigned>(thread);
        Current() = &cta;
        function();
      });
    }
    for (std::thread& thread : running) thread.join();
  }
  static Cta*& Current() {
    static thread_local Cta* current = nullptr;
    return current;
  }
  static Warp& OwnWarp() { return *Current()->warps_[threadIdx.x / 32]; }
  // The values of all lanes.
  static void Exchange(uint32_t value, uint32_t (&values)[32]) {
    Warp& warp = OwnWarp();
    warp.slots[threadIdx.x % 32] = value;
    warp.barrier.Wait();
    std::copy_n(warp.slots, 32, values);
    warp.barrier.Wait();
  }
  Barrier barrier;

 private:
  explicit Cta(int threads) : barrier(threads) {
    for (int i = 0; i < threads / 32; ++i) warps_.push_back(std::make_unique<Warp>());
  }
  std::vector<std::unique_ptr<Warp>> warps_;
};

template <typename T, typename Fold>
T Reduce(T value, const Fold& fold) {
  uint32_t values[32];
  Cta::Exchange(static_cast<uint32_t>(value), values);
  T result = static_cast<T>(values[0]);
  for (int i = 1; i < 32; ++i) result = fold(result, static_cast<T>(values[i]));
  return result;
}

}  // namespace stof::test::emulated_cta

using std::max;
using std::min;
inline void __syncthreads() { stof::test::emulated_cta::Cta::Current()->barrier.Wait(); }
inline int __reduce_add_sync(unsigned, int value) {
  return stof::test::emulated_cta::Reduce(value, [](int x, int y) { return x + y; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return stof::test::emulated_cta::Reduce(value, [](uint32_t x, uint32_t y) { return min(x, y); });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return stof::test::emulated_cta::Reduce(value, [](uint32_t x, uint32_t y) { return max(x, y); });
}
inline uint32_t __ballot_sync(unsigned, bool value) {
  uint32_t values[32], bits = 0;
  stof::test::emulated_cta::Cta::Exchange(value ? 1 : 0, values);
  for (int i = 0; i < 32; ++i) bits |= values[i] << i;
  return bits;
}
inline int __shfl_up_sync(unsigned, int value, int step) {
  uint32_t values[32];
  stof::test::emulated_cta::Cta::Exchange(static_cast<uint32_t>(value), values);
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane >= step ? static_cast<int>(values[lane - step]) : value;
}
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
