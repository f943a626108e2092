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

#include "tests/cpp/emulated_lanes/lanes.h"

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

  Rendezvous lanes{kLanes};
  float values[kLanes] = {};
  Fragments fragments[kLanes];
};

// What address 0 of shared memory is. Set while no warp runs.
inline const unsigned char*& SharedMemory() {
  static const unsigned char* memory = nullptr;
  return memory;
}

}  // namespace stof::test::emulated

using std::max;
using std::min;
inline float __shfl_sync(unsigned, float value, int source) {
  auto& warp = *stof::test::emulated::Warp::Current();
  warp.values[stof::test::emulated::Warp::Lane()] = value;
  warp.lanes.Wait();
  const float got = warp.values[source];
  warp.lanes.Wait();
  return got;
}
inline int __all_sync(unsigned, bool value) {
  auto& warp = *stof::test::emulated::Warp::Current();
  warp.values[stof::test::emulated::Warp::Lane()] = value ? 1.0f : 0.0f;
  warp.lanes.Wait();
  bool all = true;
  for (const float x : warp.values) all = all && x != 0.0f;
  warp.lanes.Wait();
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
  auto& warp = *test::emulated::Warp::Current();
  const int lane = test::emulated::Warp::Lane();
  auto& own = warp.fragments[lane];
  std::copy_n(a, 4, own.a);
  own.b[0] = b0, own.b[1] = b1;
  warp.lanes.Wait();
  test::emulated::MultiplyFragments(warp.fragments, lane, c);
  warp.lanes.Wait();
}

}  // namespace cuda
}  // namespace stof
