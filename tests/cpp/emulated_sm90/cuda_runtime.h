// SPDX-License-Identifier: Apache-2.0
// In place of the header of the CUDA toolkit: CTAs run on the host, a thread for each of theirs. It also stands for
// cuda/common/mma_sm90.cuh and launch.cuh: mbarriers, TMA with its 128-byte swizzle, wgmma as the PTX ISA defines its
// fragments and descriptors, in bf16. Copies and products end where they are queued.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/cpp/emulated_lanes/lanes.h"
#include "tests/cpp/emulated_sm90/cuda.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define STOF_CUDA_COMMON_LAUNCH_CUH_
#define STOF_CUDA_COMMON_MMA_SM80_CUH_
#define STOF_CUDA_COMMON_MMA_SM90_CUH_

struct alignas(8) float2 {
  float x, y;
};
struct int2 {
  int x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

namespace stof::test::emulated_sm90 {

using emulated::Rendezvous;

struct Warp {
  Rendezvous lanes{32};
  uint64_t words[32] = {};
};

// By its address in shared memory.
struct Mbarrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;   // that copies still have to bring
  int64_t phases = 0;  // that are over
  void EndIfComplete(std::condition_variable* waiting) {
    if (pending != 0 || bytes != 0) return;
    ++phases, pending = arrivals;
    waiting->notify_all();
  }
};

struct Index {
  unsigned x = 0;
};

// The CTA that runs, and what its threads share.
struct Cta {
  Index block, grid;
  unsigned char* shared = nullptr;  // address 0 of shared memory, aligned to 1024
  std::unique_ptr<Rendezvous> threads;
  std::vector<std::unique_ptr<Warp>> warps;
  std::mutex mutex;
  std::condition_variable waiting;
  std::map<uint32_t, Mbarrier> mbarriers;
  std::map<int, std::unique_ptr<Rendezvous>> named;
};
inline Cta*& Current() {
  static Cta* cta = nullptr;
  return cta;
}
inline Index& Thread() {
  static thread_local Index thread;
  return thread;
}
inline unsigned Lane() { return Thread().x % 32; }
inline Warp& OwnWarp() { return *Current()->warps[Thread().x / 32]; }

// Runs CTA `block` of a grid: `function` in each of its threads.
inline void RunCta(unsigned threads, unsigned grid, unsigned block, unsigned char* shared,
                   const std::function<void()>& function) {
  Cta cta;
  cta.block.x = block, cta.grid.x = grid, cta.shared = shared;
  cta.threads = std::make_unique<Rendezvous>(static_cast<int>(threads));
  for (unsigned i = 0; i < threads / 32; ++i) cta.warps.push_back(std::make_unique<Warp>());
  Current() = &cta;
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads; ++i) {
    all.emplace_back([&function, i] {
      Thread().x = i;
      function();
    });
  }
  for (std::thread& thread : all) thread.join();
  Current() = nullptr;
}

// The value of the same call in another lane.
template <typename T>
T Exchange(T x, unsigned source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  Warp& warp = OwnWarp();
  std::memcpy(&warp.words[Lane()], &x, sizeof x);
  warp.lanes.Wait();
  std::memcpy(&x, &warp.words[source], sizeof x);
  warp.lanes.Wait();
  return x;
}

inline float FromBf16(uint32_t bits) {
  bits <<= 16;
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// Rounds to nearest even.
inline uint32_t ToBf16(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return std::isnan(x) ? bits >> 16 | 1 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

}  // namespace stof::test::emulated_sm90

#define threadIdx stof::test::emulated_sm90::Thread()
#define blockIdx stof::test::emulated_sm90::Current()->block
#define gridDim stof::test::emulated_sm90::Current()->grid

// Functions have internal linkage: other tests have others of the same names.

template <typename A, typename B>
constexpr auto min(A a, B b) {
  return a < b ? a : b;
}
static inline int __popc(uint32_t x) { return __builtin_popcount(x); }
static inline void __syncwarp() { stof::test::emulated_sm90::OwnWarp().lanes.Wait(); }
static inline void __syncthreads() { stof::test::emulated_sm90::Current()->threads->Wait(); }
template <typename T>
static T __shfl_sync(unsigned, T x, int source) {
  return stof::test::emulated_sm90::Exchange(x, static_cast<unsigned>(source) % 32);
}
template <typename T>
static T __shfl_xor_sync(unsigned, T x, int other) {
  return stof::test::emulated_sm90::Exchange(x, stof::test::emulated_sm90::Lane() ^ static_cast<unsigned>(other));
}
template <typename T>
static T __shfl_up_sync(unsigned, T x, unsigned by) {
  const unsigned lane = stof::test::emulated_sm90::Lane();
  return stof::test::emulated_sm90::Exchange(x, lane >= by ? lane - by : lane);
}
static inline uint32_t __ballot_sync(unsigned, bool x) {
  auto& warp = stof::test::emulated_sm90::OwnWarp();
  warp.words[stof::test::emulated_sm90::Lane()] = x ? 1 : 0;
  warp.lanes.Wait();
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(warp.words[i] & 1) << i;
  warp.lanes.Wait();
  return votes;
}
static inline int __any_sync(unsigned mask, bool x) { return __ballot_sync(mask, x) != 0 ? 1 : 0; }
static inline int __all_sync(unsigned mask, bool x) { return __ballot_sync(mask, !x) == 0 ? 1 : 0; }
template <typename T>
static T atomicAdd(T* to, T x) {
  return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST);
}
static inline uint32_t atomicOr(uint32_t* to, uint32_t x) { return __atomic_fetch_or(to, x, __ATOMIC_SEQ_CST); }

namespace stof {
namespace cuda {

struct Sm90Bf16 {
  uint16_t bits;
};
constexpr int kWarpgroup = 128;

template <typename T>
static float2 Unpack(uint32_t pair) {
  return {test::emulated_sm90::FromBf16(pair & 0xffff), test::emulated_sm90::FromBf16(pair >> 16)};
}
template <typename T>
static uint32_t Pack(float low, float high) {
  return test::emulated_sm90::ToBf16(low) | test::emulated_sm90::ToBf16(high) << 16;
}
static inline float MaxOrNan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : std::fmax(x, y); }

static inline void LetNextStart() {}
static inline void WaitForPrevious() {}
static inline void PrefetchMap(const CUtensorMap*) {}
static inline void FenceBarrierInit() {}
static inline void WgmmaFence() {}
static inline void WgmmaCommit() {}
template <int kPending>
static void WgmmaWait() {}
template <int kCount>
static void PinRegisters(float (&)[kCount]) {}

static inline uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - test::emulated_sm90::Current()->shared);
}
static inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  auto& cta = *test::emulated_sm90::Current();
  const std::lock_guard<std::mutex> lock(cta.mutex);
  auto& own = cta.mbarriers[barrier];
  own.arrivals = own.pending = static_cast<int>(arrivals);
}
static inline void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  auto& cta = *test::emulated_sm90::Current();
  const std::lock_guard<std::mutex> lock(cta.mutex);
  auto& own = cta.mbarriers.at(barrier);
  own.bytes += bytes, --own.pending;
  own.EndIfComplete(&cta.waiting);
}
static inline void Arrive(uint32_t barrier) { ArriveExpect(barrier, 0); }
// The lanes of a warp that waits leave together on a device, whose warps stay converged: there one lane cannot arrive,
// and let another phase end, before the others have looked. Here lanes are threads, and some are late now and then. So
// a thread waits for the phase that follows the last one for which it waited, also where later ones are over.
static inline void Wait(uint32_t barrier, uint32_t parity) {
  auto& cta = *test::emulated_sm90::Current();
  static std::atomic<uint32_t> calls{0};
  if (calls.fetch_add(1) * 2654435769u >> 24 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  static thread_local std::map<uint32_t, int64_t> next_phases;  // a thread has one CTA; phase -1 is over from the start
  int64_t& next = next_phases.emplace(barrier, -1).first->second;
  if ((next & 1) != static_cast<int64_t>(parity)) ++next;
  std::unique_lock<std::mutex> lock(cta.mutex);
  auto& own = cta.mbarriers.at(barrier);
  cta.waiting.wait(lock, [&] { return own.phases > next; });
  ++next;
}
static inline test::emulated_sm90::Rendezvous& NamedBarrier(int id, int threads) {
  auto& cta = *test::emulated_sm90::Current();
  const std::lock_guard<std::mutex> lock(cta.mutex);
  auto& barrier = cta.named[id];
  if (barrier == nullptr) barrier = std::make_unique<test::emulated_sm90::Rendezvous>(threads);
  return *barrier;
}
static inline void SyncNamed(int id, int threads) { NamedBarrier(id, threads).Wait(); }

// Where the swizzle of rows of `span` bytes puts an address: bits 4 to 6 are exchanged by bits 7 to 9, or bits 4 and 5
// by bits 7 and 8.
static inline uint32_t Swizzle(uint32_t address, int span) {
  return address ^ (address >> 7 & (span == 128 ? 7u : 3u)) << 4;
}
// Calls `copy` with each 16 bytes of a box: their address in shared memory, and in the tensor; nullptr: out of bounds.
template <typename Copy>
static void ForUnitsOfBox(uint32_t shared, const CUtensorMap& map, int d, int s, int h, int b, const Copy& copy) {
  for (int row = 0; row < map.box_rows; ++row) {
    for (int unit = 0; unit < map.span / 16; ++unit) {
      const int64_t at = ((b * map.heads + h) * map.rows + s + row) * map.size + d;
      auto* const bytes = static_cast<unsigned char*>(const_cast<void*>(map.data)) + map.item * at + 16 * unit;
      copy(Swizzle(shared + static_cast<uint32_t>(map.span * row + 16 * unit), map.span),
           s + row < map.rows ? bytes : nullptr);
    }
  }
}
static inline void CompleteBytes(uint32_t barrier, int64_t bytes) {
  auto& cta = *test::emulated_sm90::Current();
  const std::lock_guard<std::mutex> lock(cta.mutex);
  auto& own = cta.mbarriers.at(barrier);
  own.bytes -= bytes;
  own.EndIfComplete(&cta.waiting);
}
static inline void CopyTensor(uint32_t to, const CUtensorMap* map, uint32_t barrier, int d, int s, int h, int b) {
  unsigned char* const memory = test::emulated_sm90::Current()->shared;
  ForUnitsOfBox(to, *map, d, s, h, b, [memory](uint32_t at, const unsigned char* from) {
    std::memset(memory + at, 0, 16);
    if (from != nullptr) std::memcpy(memory + at, from, 16);
  });
  CompleteBytes(barrier, int64_t{map->span} * map->box_rows);
}

static inline uint32_t DescribeInner(uint32_t address) { return address >> 4 | 1u << 16; }
static inline uint64_t Operand(uint32_t low) { return low; }

template <int kCount>
static void MultiplyAcross(float (&c)[kCount], const uint32_t* a, uint64_t b);  // attention_device.h

template <typename T>
struct Wgmma {
  template <int kCount>
  static void Across(float (&c)[kCount], const uint32_t* a, uint64_t b) {
    MultiplyAcross(c, a, b);
  }
  // An element of a K-major operand whose atoms of 8 rows follow each other.
  static float ElementOf(uint64_t operand, int row, int k) {
    const auto linear =
        static_cast<uint32_t>((operand & 0x3fff) * 16) + static_cast<uint32_t>(row / 8 * 1024 + row % 8 * 128 + 2 * k);
    uint16_t bits = 0;
    std::memcpy(&bits, test::emulated_sm90::Current()->shared + (linear ^ (linear >> 7 & 7) << 4), sizeof bits);
    return test::emulated_sm90::FromBf16(bits);
  }
  template <int kCount>
  static void Inner(float (&c)[kCount], uint64_t a, uint64_t b, int add) {
    const auto lane = static_cast<int>(test::emulated_sm90::Lane()),
               warp = static_cast<int>(test::emulated_sm90::Thread().x) / 32 % 4;
    for (int i = 0; i < kCount; ++i) {
      const int row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = add != 0 ? c[i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += ElementOf(a, row, k) * ElementOf(b, column, k);
      c[i] = sum;
    }
  }
};

}  // namespace cuda
}  // namespace stof
