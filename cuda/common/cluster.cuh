// SPDX-License-Identifier: Apache-2.0
// The barrier of a cluster, which only code for 9.0 and later has.
#ifndef STOF_CUDA_COMMON_CLUSTER_CUH_
#define STOF_CUDA_COMMON_CLUSTER_CUH_

namespace stof {
namespace cuda {

// All threads of a cluster arrive; what they wrote before is seen by all after the wait.
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

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_CLUSTER_CUH_
