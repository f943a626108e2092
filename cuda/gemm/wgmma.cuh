// SPDX-License-Identifier: Apache-2.0
// Instructions of compute capability 9.0a that the GEMM kernels use beyond those of mma_sm90.cuh: b across the inner
// dimension from shared memory, copies to all CTAs of a cluster, stores by the copy engine.
#ifndef STOF_CUDA_GEMM_WGMMA_CUH_
#define STOF_CUDA_GEMM_WGMMA_CUH_

#include "cuda/common/mma_sm90.cuh"

namespace stof {
namespace cuda {

// c[64 x N] (+)= a[64 x 16] · b[16 x N]: a in shared memory along the inner dimension, b across it (rows are K).
template <typename T>
struct WgmmaAcross;
#define STOF_WGMMA_ACROSS(type, name)                                                                                  \
  template <>                                                                                                          \
  struct WgmmaAcross<type> {                                                                                           \
    static __device__ __forceinline__ void Run(float (&c)[32], uint64_t a, uint64_t b, int add) {                      \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                             \
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name " " STOF_R32 ", %32, %33, add, 1, 1, 0, 1;\n}\n" \
          : STOF_F32(c)                                                                                                \
          : "l"(a), "l"(b), "r"(add));                                                                                 \
    }                                                                                                                  \
    static __device__ __forceinline__ void Run(float (&c)[64], uint64_t a, uint64_t b, int add) {                      \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                             \
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." name "." name " " STOF_R64                                    \
          ", %64, %65, add, 1, 1, 0, 1;\n}\n"                                                                          \
          : STOF_F64(c)                                                                                                \
          : "l"(a), "l"(b), "r"(add));                                                                                 \
    }                                                                                                                  \
    static __device__ __forceinline__ void Run(float (&c)[96], uint64_t a, uint64_t b, int add) {                      \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"                                                             \
          "wgmma.mma_async.sync.aligned.m64n192k16.f32." name "." name " " STOF_R96                                    \
          ", %96, %97, add, 1, 1, 0, 1;\n}\n"                                                                          \
          : STOF_F96(c)                                                                                                \
          : "l"(a), "l"(b), "r"(add));                                                                                 \
    }                                                                                                                  \
    static __device__ __forceinline__ void Run(float (&c)[128], uint64_t a, uint64_t b, int add) {                     \
      asm volatile(                                                                                                    \
          "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                            \
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." name "." name " " STOF_R128                                   \
          ", %128, %129, add, 1, 1, 0, 1;\n}\n"                                                                        \
          : STOF_F128(c)                                                                                               \
          : "l"(a), "l"(b), "r"(add));                                                                                 \
    }                                                                                                                  \
  };
STOF_WGMMA_ACROSS(__half, "f16")
STOF_WGMMA_ACROSS(__nv_bfloat16, "bf16")
#undef STOF_WGMMA_ACROSS

// ---- clusters ----
__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Orders nothing but what fences order: a release would wait for all of the CTA's stores.
__device__ __forceinline__ void SyncCluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The barrier at this address in another CTA of the cluster, or this one. What it orders are reads by products, which
// have ended; release.cluster would wait for the device's memory at every step (MEMBAR.ALL.GPU: half the speed).
__device__ __forceinline__ void ArriveAt(uint32_t barrier, uint32_t cta) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(barrier),
      "r"(cta)
      : "memory");
}
// ---- copies ----
// The box of a matrix at these coordinates, zeros beyond its ends; to the same place of every CTA in `ctas` (a bit
// each), and off the barrier at the same place of each.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
__device__ __forceinline__ void CopyBoxTo(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                          uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "h"(ctas)
      : "memory");
}
// From shared memory to the box; what lies beyond the matrix's ends is not written.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(from), "r"(column), "r"(row)
               : "memory");
}
__device__ __forceinline__ void WaitStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_GEMM_WGMMA_CUH_
