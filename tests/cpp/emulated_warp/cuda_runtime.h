// SPDX-License-Identifier: Apache-2.0
// In place of the header of the CUDA toolkit: device functions of one warp run on the host, a thread for each lane. It
// also stands for cuda/common/mma_sm80.cuh, with mma.sync as the PTX ISA defines its fragments. Only warps whose lanes
// all call the same functions in the same order work.
#pragma once
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline
#define STOF_CUDA_COMMON_MMA_SM80_CUH_

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace stof::test::emulated {

// What the lanes of a warp share.
class Warp {
 public:
  static constexpr int kLanes = 32;
  struct Slot {
    float value = 0.0f;
    uint32_t a[4] = {}, b[2] = {};
  };

  // Runs a function of the lane in each lane.
  static void Run(const std::function<void(int lane)>& function) {
    Warp warp;
    std::vector<std::thread> threads;
    for (int lane = 0; lane < kLanes; ++lane) {
      threads.emplace_back([&warp, &function, lane] {
        Current() = &warp, Lane() = lane;
        function(lane);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static Warp*& Current() {
    static thread_local Warp* current = nullptr;
    return current;
  }
  static int& Lane() {
    static thread_local int lane = 0;
    return lane;
  }

  // Waits for all lanes.
  void Sync() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t turn = turn_;
    if (++arrived_ == kLanes) {
      arrived_ = 0, ++turn_;
      all_.notify_all();
      return;
    }
    all_.wait(lock, [&] { return turn_ != turn; });
  }
  Slot slots[kLanes];

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int arrived_ = 0;
  int64_t turn_ = 0;
};

// What address 0 of shared memory is. Set while no warp runs.
inline const unsigned char*& SharedMemory() {
  static const unsigned char* memory = nullptr;
  return memory;
}

inline float ElementOf(uint32_t word, int i) {  // bf16
  const uint32_t bits = (word >> 16 * i) << 16;
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace stof::test::emulated

using std::max;
using std::min;
inline float __shfl_sync(unsigned, float value, int source) {
  auto& warp = *stof::test::emulated::Warp::Current();
  warp.slots[stof::test::emulated::Warp::Lane()].value = value;
  warp.Sync();
  const float got = warp.slots[source].value;
  warp.Sync();
  return got;
}
inline int __all_sync(unsigned, bool value) {
  auto& warp = *stof::test::emulated::Warp::Current();
  warp.slots[stof::test::emulated::Warp::Lane()].value = value ? 1.0f : 0.0f;
  warp.Sync();
  bool all = true;
  for (const auto& slot : warp.slots) all = all && slot.value != 0.0f;
  warp.Sync();
  return all ? 1 : 0;
}
inline void __syncwarp() {}

namespace stof {
namespace cuda {

struct EmulatedBf16 {
  uint16_t bits;
};
inline float ToFloat(EmulatedBf16 x) { return test::emulated::ElementOf(x.bits, 0); }
// Cuts the lower half off: for numbers that have none.
template <typename T>
uint32_t Pack(float low, float high) {
  uint32_t words[2];
  std::memcpy(&words[0], &low, sizeof low), std::memcpy(&words[1], &high, sizeof high);
  return words[0] >> 16 | (words[1] & 0xffff0000u);
}

template <int kCount>
void LoadConstant(uint32_t (&r)[kCount], const uint32_t* from) {
  std::copy_n(from, kCount, r);
}

// Of shared memory at test::emulated::SharedMemory().
inline void LoadShared(uint32_t (&r)[4], uint32_t address) {
  std::memcpy(r, test::emulated::SharedMemory() + address, sizeof r);
}

template <typename T>
void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using test::emulated::ElementOf;
  auto& warp = *test::emulated::Warp::Current();
  const int lane = test::emulated::Warp::Lane();
  auto& own = warp.slots[lane];
  std::copy_n(a, 4, own.a);
  own.b[0] = b0, own.b[1] = b1;
  warp.Sync();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      // Row 8 r + g, column 8 c + 2 t + i of A is element i of word 2 c + r of lane 4 g + t.
      const float x = ElementOf(warp.slots[row % 8 * 4 + k % 8 / 2].a[k / 8 * 2 + row / 8], k % 2);
      // Row 8 r + 2 t + i, column g of B is element i of word r of lane 4 g + t.
      const float y = ElementOf(warp.slots[column * 4 + k % 8 / 2].b[k / 8], k % 2);
      c[e] += x * y;
    }
  }
  warp.Sync();
}

}  // namespace cuda
}  // namespace stof
