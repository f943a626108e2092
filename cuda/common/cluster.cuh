// SPDX-License-Identifier: Apache-2.0
// Thread block clusters: rank and barriers, compute capability 9.0 and later.
#ifndef STOF_CUDA_COMMON_CLUSTER_CUH_
#define STOF_CUDA_COMMON_CLUSTER_CUH_

#include <cstdint>

namespace stof {
namespace cuda {

// All threads of the cluster arrive. After the wait all of them see what any wrote before.
__device__ __forceinline__ void ArriveAtCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void AwaitCluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// ---- compute capability 9.0 alone: callers have no other code ----
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of the cluster arrive and wait. It orders only what fences order: a release would wait for all of the
// CTA's stores.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Arrives at the mbarrier at this address in another CTA of the cluster, or this one. It orders reads by wgmma, which
// have ended; release.cluster would wait for the device's memory at every step (MEMBAR.ALL.GPU: half the speed).
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_CLUSTER_CUH_
