// SPDX-License-Identifier: Apache-2.0
// In place of the header of the CUDA toolkit: device functions of one CTA run on the host, a thread for each of its
// threads. It also stands for the headers whose guards it defines, with a bf16 of its own and mma.sync as the PTX ISA
// defines its fragments. Only code whose warps call the same warp functions in the same order works.
#pragma once
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tests/cpp/emulated_lanes/lanes.h"

#define __device__
#define __forceinline__ inline
#define STOF_CUDA_COMMON_LAUNCH_CUH_
#define STOF_CUDA_COMMON_MMA_SM80_CUH_
#define STOF_CUDA_COMMON_ROUND_CUH_
#define STOF_CUDA_CHOOSE_PAGES_LOADS_CUH_

struct uint3 {
  unsigned x, y, z;
};
inline thread_local uint3 threadIdx = {0, 0, 0}, blockIdx = {0, 0, 0};

namespace stof::test::emulated_sm80 {

using emulated::Rendezvous;

struct Warp {
  Rendezvous barrier{32};
  uint32_t slots[32] = {};
  emulated::Fragments fragments[32];
};

class Cta {
 public:
  // Runs a function in each of `threads` threads, a multiple of 32, of CTA `block`.
  static void Run(int threads, const std::function<void()>& function, int block = 0) {
    Cta cta(threads);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread) {
      running.emplace_back([&cta, &function, thread, block] {
        threadIdx.x = static_cast<unsigned>(thread);
        blockIdx.x = static_cast<unsigned>(block);
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
  Rendezvous barrier;

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

}  // namespace stof::test::emulated_sm80

// Functions have internal linkage: other tests have others of the same names.
using std::max;
using std::min;
static inline void __syncthreads() { stof::test::emulated_sm80::Cta::Current()->barrier.Wait(); }
static inline int __reduce_add_sync(unsigned, int value) {
  return stof::test::emulated_sm80::Reduce(value, [](int x, int y) { return x + y; });
}
static inline uint32_t __reduce_min_sync(unsigned, uint32_t value) {
  return stof::test::emulated_sm80::Reduce(value, [](uint32_t x, uint32_t y) { return min(x, y); });
}
static inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return stof::test::emulated_sm80::Reduce(value, [](uint32_t x, uint32_t y) { return max(x, y); });
}
static inline uint32_t __ballot_sync(unsigned, bool value) {
  uint32_t values[32], bits = 0;
  stof::test::emulated_sm80::Cta::Exchange(value ? 1 : 0, values);
  for (int i = 0; i < 32; ++i) bits |= values[i] << i;
  return bits;
}
static inline int __shfl_up_sync(unsigned, int value, int step) {
  uint32_t values[32];
  stof::test::emulated_sm80::Cta::Exchange(static_cast<uint32_t>(value), values);
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane >= step ? static_cast<int>(values[lane - step]) : value;
}
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline int __clz(uint32_t x) { return x == 0 ? 32 : __builtin_clz(x); }
static inline int atomicAdd(int* to, int value) { return __atomic_fetch_add(to, value, __ATOMIC_RELAXED); }
static inline float __uint_as_float(uint32_t bits) {
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
static inline uint32_t __float_as_uint(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float __shfl_xor_sync(unsigned, float value, int step) {
  uint32_t values[32];
  stof::test::emulated_sm80::Cta::Exchange(__float_as_uint(value), values);
  return __uint_as_float(values[static_cast<int>(threadIdx.x % 32) ^ step]);
}
using std::isnan;

namespace stof {
namespace cuda {

struct Sm80Bf16 {
  uint16_t bits;
};
static inline float ToFloat(Sm80Bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
static inline uint32_t RoundToBf16(float x) {
  const uint32_t bits = __float_as_uint(x);
  return isnan(x) ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
template <typename T>
static T Round(float x) {
  return {static_cast<uint16_t>(RoundToBf16(x))};
}
static inline void WaitForPrevious() {}
static inline void LetNextStart() {}
static inline float MaxOrNan(float x, float y) { return isnan(x) || isnan(y) ? NAN : max(x, y); }

static inline int32_t LoadFresh(const int32_t* from) { return *from; }
static inline void LoadFresh(uint32_t (&x)[4], const void* from) { std::memcpy(x, from, sizeof x); }
static inline void LoadBounds(uint32_t (&x)[4], const void* from, bool valid) {
  std::memset(x, 0, sizeof x);
  if (valid) std::memcpy(x, from, sizeof x);
}
template <typename T>
static uint32_t PartOf(uint32_t query, bool above) {
  uint32_t part = 0;
  for (int i = 0; i < 2; ++i) {
    const float x = __uint_as_float(query >> 16 * i << 16);
    const bool is_there = isnan(x) || (above ? x > 0.0f : x < 0.0f);
    part |= (is_there ? query >> 16 * i & 0xffffu : 0u) << 16 * i;
  }
  return part;
}

template <typename T>
static void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& warp = test::emulated_sm80::Cta::OwnWarp();
  const int lane = static_cast<int>(threadIdx.x % 32);
  auto& own = warp.fragments[lane];
  std::copy_n(a, 4, own.a);
  own.b[0] = b0, own.b[1] = b1;
  warp.barrier.Wait();
  test::emulated::MultiplyFragments(warp.fragments, lane, c);
  warp.barrier.Wait();
}

}  // namespace cuda
}  // namespace stof
