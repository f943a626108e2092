// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the cluster kernel, its copies, and distributed shared memory.
#ifndef STOF_CUDA_ATTENTION_DECODE_CLUSTER_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_DECODE_CLUSTER_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, int kBlocks>
struct ClusterShape {
  // A step of a warp is 16 keys, one chain of dependent instructions: it takes eight warps to hide the latency. Wide
  // rows leave shared memory for four.
  static constexpr int kRowBytes = kHead * static_cast<int>(sizeof(T));
  static constexpr int kWarps = kRowBytes <= 256 ? 8 : 4, kThreads = 32 * kWarps;
  static constexpr int kWarpKeys = 16;                                 // keys of a warp in a tile
  static constexpr int kTilesAtOnce = kWarps * kWarpKeys / kTileKeys;  // KV tiles that a CTA works on at once
  static constexpr int kRows = 8 * kBlocks;
  static constexpr int kPerLoad = 16 / static_cast<int>(sizeof(T));  // elements of a copy
  static constexpr int kChunks = kHead / (4 * kPerLoad);             // copies of a key's row by 4 lanes
  static constexpr int kLoads = 2 * kChunks;                         // loads of a lane from a stage
  static constexpr int kOutputs = kHead / 16;                        // blocks of 16 output elements
  static constexpr int kStageBytes = 16 * 32 * kLoads;
  static constexpr int kQueryBytes = kBlocks * kChunks * 32 * 16;
  static constexpr int kStepSlots = 4;
  static constexpr int kStepWords = 4 + kRows;  // tile, element mask or -1, padding, unused; then a word of bits a row
  static constexpr int kStepBytes = 4 * kWarps * kStepSlots * kStepWords;
  static constexpr int kStatsBytes = 8 * kWarps * kRows;
  // What the CTAs of the cluster send: row max and row sum of all rows, and their contributions to this CTA's share of
  // the output.
  static constexpr int kMostCtas = 8;
  static constexpr int kReceivedStatsBytes = 8 * kMostCtas * kRows, kReceivedBytes = 4 * kRows * kHead + 16 * kMostCtas;
  static constexpr int kQueries = kStepBytes, kStats = kQueries + kQueryBytes;  // offsets
  static constexpr int kReceivedStats = kStats + kStatsBytes,
                       kReceived = (kReceivedStats + kReceivedStatsBytes + 15) / 16 * 16;
  static constexpr int kRing = (kReceived + kReceivedBytes + 127) / 128 * 128;
  static constexpr int kCtaStageBytes = kWarps * kStageBytes;
  // Stages of a warp's ring: an even number, or one where two do not fit every device. Two CTAs have to fit an SM: else
  // clusters find too few free SMs.
  static constexpr int kFit = (96 * 1024 - kRing) / kCtaStageBytes;
  static constexpr bool kOdd = kFit == 1;
  static constexpr int kStages = kFit >= 4 ? 4 : kOdd ? 1 : 2;
  static_assert(kFit >= 1, "a stage has to fit");
  static_assert(kStages / 2 + 2 <= kStepSlots, "slots for the steps in flight");
  static constexpr int kSharedBytes = kRing + kStages * kCtaStageBytes;
  // The outputs of a warp replace its ring, those of the CTA the ring of the first warp.
  static_assert(4 * kRows * kHead <= kStages * kStageBytes, "room for sums");
  static constexpr int kCtas = sizeof(T) == 4 || kBlocks * kHead > 128 ? (kWarps == 8 ? 1 : 2) : 2;  // CTAs an SM
};

// Copies 16 bytes to shared memory; writes zeros, and reads nothing, where not `valid`. Prefetches their 128 bytes into
// L2.
__device__ __forceinline__ void CopyChunk(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void CopyWord(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Waits until at most kLeft copy groups of this thread are in flight, then synchronizes the warp.
template <int kLeft>
__device__ __forceinline__ void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
  __syncwarp();
}
__device__ __forceinline__ uint4 ReadChunk(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from));
  return x;
}

// Brings a row into L2; address and size are multiples of 16 bytes.
__device__ __forceinline__ void PrefetchRow(const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#endif
}

// ---- distributed shared memory: compute capability 9.0 and later ----
// Stores to the shared memory of CTA `rank` of this cluster, which has to run; `own` is the corresponding address in
// this CTA.
__device__ __forceinline__ void Send4(float4* own, int rank, const float4& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .u32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.v4.f32 [at], {%2, %3, %4, %5};\n}" ::
          "r"(static_cast<uint32_t>(__cvta_generic_to_shared(own))),
      "r"(rank), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
      : "memory");
#endif
}
__device__ __forceinline__ void Send2(float2* own, int rank, const float2& x) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .u32 at;\nmapa.shared::cluster.u32 at, %0, %1;\nst.shared::cluster.v2.f32 [at], {%2, %3};\n}" ::"r"(
          static_cast<uint32_t>(__cvta_generic_to_shared(own))),
      "r"(rank), "f"(x.x), "f"(x.y)
      : "memory");
#endif
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_CLUSTER_SHAPE_CUH_
