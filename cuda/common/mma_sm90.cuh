// SPDX-License-Identifier: Apache-2.0
// Wrappers of what compute capability 9.0a adds: wgmma, TMA copies and mbarriers, for attention and GEMM.
#ifndef STOF_CUDA_COMMON_MMA_SM90_CUH_
#define STOF_CUDA_COMMON_MMA_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

constexpr int kWarpgroup = 128;  // threads

// ---- mbarriers, by their address in shared memory ----
__device__ __forceinline__ void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialized barriers visible to TMA.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase ends only after TMA has copied `bytes` more.
__device__ __forceinline__ void ArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits for the end of the phase of this parity.
__device__ __forceinline__ void Wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same number, which the compiler cannot recompute: it stays in a register.
__device__ __forceinline__ uint32_t Opaque(uint32_t x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
// Loads a word that no kernel writes.
__device__ __forceinline__ uint32_t LoadWord(const uint32_t* from) {
  uint32_t x;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

// Prefetches a line of 128 bytes into L2.
__device__ __forceinline__ void PrefetchLine(const void* line) { asm volatile("prefetch.global.L2 [%0];" ::"l"(line)); }

__device__ __forceinline__ void LoadShared(int (&r)[2], uint32_t address) {
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r[0]) : "r"(address) : "memory");
  asm volatile("ld.shared.b32 %0, [%1 + 4];" : "=r"(r[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ float2 LoadSharedFloats(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
  return x;
}

template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t pair);
template <>
__device__ __forceinline__ float2 Unpack<__half>(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 Unpack<__nv_bfloat16>(uint32_t pair) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&pair));
}

// ---- named barriers of a CTA ----
__device__ __forceinline__ void SyncNamed(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void ArriveNamed(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Whether `x` is true for any of the threads, which meet at the barrier.
__device__ __forceinline__ bool AnyNamed(int id, int threads, bool x) {
  int any;
  asm volatile(
      "{\n.reg .pred own, all;\nsetp.ne.b32 own, %3, 0;\nbar.red.or.pred all, %1, %2, own;\n"
      "selp.b32 %0, 1, 0, all;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(x ? 1 : 0)
      : "memory");
  return any != 0;
}

// ---- TMA ----
// Loads the box of a tensor [B, H, S, D] at these coordinates, zeros out of bounds; completes its bytes on the barrier.
__device__ __forceinline__ void CopyTensor(uint32_t to, const CUtensorMap* map, uint32_t barrier, int d, int s, int h,
                                           int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b)
      : "memory");
}
__device__ __forceinline__ void PrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Prefetches a box into L2.
__device__ __forceinline__ void PrefetchTensor(const CUtensorMap* map, int d, int s, int h, int b) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(reinterpret_cast<uint64_t>(map)),
      "r"(d), "r"(s), "r"(h), "r"(b)
      : "memory");
}

// Stores shared memory to the box; out of bounds nothing is written.
__device__ __forceinline__ void StoreTensor(const CUtensorMap* map, uint32_t from, int d, int s, int h, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(from), "r"(d), "r"(s), "r"(h), "r"(b)
               : "memory");
}
__device__ __forceinline__ void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the last kPending groups have read shared memory.
template <int kPending>
__device__ __forceinline__ void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Loads the box of a matrix at these coordinates, zeros out of bounds; completes its bytes on the barrier.
__device__ __forceinline__ void CopyBox(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}
// To the same address of every CTA in `ctas` (a bit each), and on the barrier at the same address of each.
__device__ __forceinline__ void CopyBoxTo(uint32_t to, const CUtensorMap* map, uint32_t barrier, int column, int row,
                                          uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(column), "r"(row), "h"(ctas)
      : "memory");
}
// Stores shared memory to the box; out of bounds nothing is written.
__device__ __forceinline__ void StoreBox(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(from), "r"(column), "r"(row)
               : "memory");
}
// Waits until all groups of stores have ended.
__device__ __forceinline__ void WaitStores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void FenceForCopies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Stores four 8 x 8 matrices of 16-bit values. A lane holds two neighbours of row lane / 4 of each, and gives the
// address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void StoreMatrix4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// ---- registers of a warpgroup ----
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- wgmma ----
// Operands in shared memory have TMA's 128-byte swizzle: rows of 128 bytes, 8 rows an atom of 1 KiB. A descriptor is a
// constant and a low word, which grows by one every 16 bytes.
// K-major (rows are M or N, the contiguous axis is K): atoms follow each other every 1024 bytes.
__device__ __forceinline__ uint32_t DescribeInner(uint32_t address) { return address >> 4 | 1u << 16; }
// MN-major (rows are K, the contiguous axis is N): 64 columns an atom, the next 64 columns `columns` bytes further.
__device__ __forceinline__ uint32_t DescribeAcross(uint32_t address, uint32_t columns) {
  return address >> 4 | columns >> 4 << 16;
}
__device__ __forceinline__ uint64_t Operand(uint32_t low) { return uint64_t{1024 >> 4 | 1u << 30} << 32 | low; }

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accesses to registers that a wgmma in flight uses across this point.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void PinRegisters(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define STOF_F4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define STOF_F16(c, i) STOF_F4(c, i), STOF_F4(c, i + 4), STOF_F4(c, i + 8), STOF_F4(c, i + 12)
#define STOF_F32(c) STOF_F16(c, 0), STOF_F16(c, 16)
#define STOF_F64(c) STOF_F16(c, 0), STOF_F16(c, 16), STOF_F16(c, 32), STOF_F16(c, 48)
#define STOF_F48(c) STOF_F32(c), STOF_F16(c, 32)
#define STOF_F80(c) STOF_F64(c), STOF_F16(c, 64)
#define STOF_F96(c) STOF_F80(c), STOF_F16(c, 80)
#define STOF_F128(c) STOF_F96(c), STOF_F16(c, 96), STOF_F16(c, 112)
#define STOF_R32                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, " \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define STOF_R48                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, %42, %43, %44, %45, %46, %47}"
#define STOF_R64                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
  "%61, %62, %63}"
#define STOF_R96                                                                                         \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
  "%61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define STOF_R128                                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "     \
  "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, " \
  "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
  "%61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "      \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, "     \
  "%116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"

// Inner: c[64 x N] (+)= a[64 x 16] · b[N x 16]ᵀ, both K-major in shared memory.
// Across: c[64 x N] += a[64 x 16] · b[16 x N], a in registers, b MN-major in shared memory.
// AcrossShared: c[64 x N] (+)= a[64 x 16] · b[16 x N], a K-major and b MN-major in shared memory.
// A thread has N / 2 elements of c: elements 4 j to 4 j + 3 are of block j of 8 columns, two of a row and two 8 rows
// below. The macros' arguments: N, N / 2 in the names of the registers, and the numbers of the further operands.
template <typename T>
struct Wgmma;
#define STOF_WGMMA_SHARED(Function, type, n, kCount, a_, b_, add_, across)                               \
  static __device__ __forceinline__ void Function(float (&c)[kCount], uint64_t a, uint64_t b, int add) { \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" add_                                           \
                 ", 0;\n"                                                                                \
                 "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " " STOF_R##kCount       \
                 ", %" a_ ", %" b_ ", add, 1, 1, 0, " across ";\n}\n"                                    \
                 : STOF_F##kCount(c)                                                                     \
                 : "l"(a), "l"(b), "r"(add));                                                            \
  }
#define STOF_WGMMA_REGISTERS(type, n, kCount, a0, a1, a2, a3, b_)                                    \
  static __device__ __forceinline__ void Across(float (&c)[kCount], const uint32_t* a, uint64_t b) { \
    asm volatile(                                                                                    \
        "{\n.reg .pred add;\nsetp.eq.b32 add, 0, 0;\n"                                               \
        "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " " STOF_R##kCount            \
        ", {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b_ ", add, 1, 1, 1;\n}\n"                        \
        : STOF_F##kCount(c)                                                                          \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                       \
  }
#define STOF_WGMMA(Type, name)                                                  \
  template <>                                                                   \
  struct Wgmma<Type> {                                                          \
    STOF_WGMMA_SHARED(Inner, name, "64", 32, "32", "33", "34", "0")             \
    STOF_WGMMA_SHARED(Inner, name, "96", 48, "48", "49", "50", "0")             \
    STOF_WGMMA_SHARED(Inner, name, "128", 64, "64", "65", "66", "0")            \
    STOF_WGMMA_SHARED(Inner, name, "256", 128, "128", "129", "130", "0")        \
    STOF_WGMMA_REGISTERS(name, "64", 32, "32", "33", "34", "35", "36")          \
    STOF_WGMMA_REGISTERS(name, "128", 64, "64", "65", "66", "67", "68")         \
    STOF_WGMMA_REGISTERS(name, "192", 96, "96", "97", "98", "99", "100")        \
    STOF_WGMMA_REGISTERS(name, "256", 128, "128", "129", "130", "131", "132")   \
    STOF_WGMMA_SHARED(AcrossShared, name, "64", 32, "32", "33", "34", "1")      \
    STOF_WGMMA_SHARED(AcrossShared, name, "128", 64, "64", "65", "66", "1")     \
    STOF_WGMMA_SHARED(AcrossShared, name, "192", 96, "96", "97", "98", "1")     \
    STOF_WGMMA_SHARED(AcrossShared, name, "256", 128, "128", "129", "130", "1") \
  };
STOF_WGMMA(__half, "f16")
STOF_WGMMA(__nv_bfloat16, "bf16")
#undef STOF_WGMMA
#undef STOF_WGMMA_SHARED
#undef STOF_WGMMA_REGISTERS

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_MMA_SM90_CUH_
