// SPDX-License-Identifier: Apache-2.0
// The barrier of a thread block cluster, compute capability 9.0 and later.
#ifndef STOF_CUDA_COMMON_CLUSTER_CUH_
#define STOF_CUDA_COMMON_CLUSTER_CUH_

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

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_CLUSTER_CUH_
