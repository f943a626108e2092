// SPDX-License-Identifier: Apache-2.0
// Further device functions on emulated CTAs, for the attention kernels: named barriers, stores by TMA, wgmma with A in
// registers, and 8-bit wgmma with the fragments of the PTX ISA. It also stands for cuda/attention/sm90/int8/mma.cuh
// and cuda/attention/int8/convert.cuh.
#pragma once
#include <cuda_runtime.h>

#include "tests/cpp/int8_attention/float8.h"

#define STOF_CUDA_ATTENTION_SM90_INT8_MMA_CUH_
#define STOF_CUDA_ATTENTION_INT8_CONVERT_CUH_

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
template <typename A, typename B>
constexpr auto max(A a, B b) {
  return a > b ? a : b;
}
static inline int __vimax3_s32(int a, int b, int c) { return max(max(a, b), c); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline float __fmul_rn(float a, float b) {
  const volatile float product = a * b;  // never part of a multiply-add
  return product;
}
static inline int __float2int_rn(float x) { return std::isnan(x) ? 0 : static_cast<int>(std::nearbyint(x)); }
static inline int __float_as_int(float x) {
  int bits = 0;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
static inline float __int_as_float(int bits) {
  float x = 0.0f;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}
static inline int atomicMax(int* to, int x) {
  int found = __atomic_load_n(to, __ATOMIC_SEQ_CST);
  while (found < x && !__atomic_compare_exchange_n(to, &found, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return found;
}

namespace stof {
namespace cuda {

static inline uint32_t Opaque(uint32_t x) { return x; }
static inline uint32_t LoadWord(const uint32_t* from) { return *from; }
static inline void PrefetchLine(const void*) {}
static inline void PrefetchTensor(const CUtensorMap*, int, int, int, int) {}
template <int kCount>
static void TakeRegisters() {}
template <int kCount>
static void GiveRegisters() {}
template <int kCount>
static void PinRegisters(uint32_t (&)[kCount]) {}
static inline float ToFloat(Sm90Bf16 x) { return test::emulated_sm90::FromBf16(x.bits); }
static inline float Exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
static inline float Reciprocal(float x) { return 1.0f / x; }

template <typename T>
static T ReadShared(uint32_t address) {
  T x;
  std::memcpy(&x, test::emulated_sm90::Current()->shared + address, sizeof x);
  return x;
}
static inline void LoadShared(int (&r)[2], uint32_t address) {
  r[0] = ReadShared<int>(address), r[1] = ReadShared<int>(address + 4);
}
static inline float LoadSharedFloat(uint32_t address) { return ReadShared<float>(address); }
static inline float2 LoadSharedFloats(uint32_t address) { return ReadShared<float2>(address); }

static inline void ArriveNamed(int id, int threads) { NamedBarrier(id, threads).Arrive(); }

// ---- TMA ----
static inline void CopyBytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  std::memcpy(test::emulated_sm90::Current()->shared + to, from, bytes);
  CompleteBytes(barrier, bytes);
}
static inline void StoreTensor(const CUtensorMap* map, uint32_t from, int d, int s, int h, int b) {
  const unsigned char* const memory = test::emulated_sm90::Current()->shared;
  ForUnitsOfBox(from, *map, d, s, h, b, [memory](uint32_t at, unsigned char* to) {
    if (to != nullptr) std::memcpy(to, memory + at, 16);
  });
}
static inline void CommitStores() {}
template <int kPending>
static void WaitStoresRead() {}
static inline void FenceForCopies() {}
static inline void StoreMatrix4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  const uint32_t r[4] = {r0, r1, r2, r3};
  const unsigned lane = test::emulated_sm90::Lane();
  for (unsigned m = 0; m < 4; ++m) {
    const uint32_t row = test::emulated_sm90::Exchange(address, 8 * m + lane / 4);
    std::memcpy(test::emulated_sm90::Current()->shared + row + lane % 4 * 4, &r[m], 4);
  }
  __syncwarp();
}

// ---- wgmma ----
static inline uint32_t DescribeAcross(uint32_t address, uint32_t columns) { return address >> 4 | columns >> 4 << 16; }
static inline uint32_t AddressOf(uint64_t operand) { return static_cast<uint32_t>(operand & 0x3fff) * 16; }

// The A fragments of the four lanes that have this lane's rows.
struct QuadFragments {
  uint32_t of[4][4];
};
static inline QuadFragments GatherQuad(const uint32_t* a) {
  struct Words {
    uint64_t low, high;
  };
  static Words shared[1024];  // by thread
  auto& warp = test::emulated_sm90::OwnWarp();
  const unsigned thread = test::emulated_sm90::Thread().x;
  std::memcpy(&shared[thread], a, 16);
  warp.lanes.Wait();
  QuadFragments quad;
  for (unsigned t = 0; t < 4; ++t) std::memcpy(quad.of[t], &shared[thread / 4 * 4 + t], 16);
  warp.lanes.Wait();
  return quad;
}

// wgmma.m64n(2 kCount)k16 of bf16 with A in registers and B across, as the kernels call it.
template <int kCount>
static void MultiplyAcross(float (&c)[kCount], const uint32_t* a, uint64_t b) {
  const QuadFragments quad = GatherQuad(a);
  const auto lane = static_cast<int>(test::emulated_sm90::Lane());
  const auto columns = static_cast<uint32_t>(b >> 16 & 0x3fff) * 16;
  for (int i = 0; i < kCount; ++i) {
    const int r = i % 4 / 2, n = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const uint32_t word = quad.of[k % 8 / 2][k / 8 * 2 + r];
      const uint32_t at = AddressOf(b) + static_cast<uint32_t>(n / 64) * columns +
                          static_cast<uint32_t>(k / 8 * 1024 + k % 8 * 128 + n % 64 * 2);
      c[i] += test::emulated_sm90::FromBf16(word >> k % 2 * 16 & 0xffff) *
              test::emulated_sm90::FromBf16(ReadShared<uint16_t>(Swizzle(at, 128)));
    }
  }
}

// A K-major operand of bytes: its rows follow each other in atoms of eight.
template <int kSpan>
static uint64_t InnerOperand(uint32_t low) {
  return uint64_t{kSpan} << 32 | low;
}
template <typename Byte>
static Byte InnerByte(uint64_t operand, int row, int k) {
  const auto span = static_cast<int>(operand >> 32);
  return ReadShared<Byte>(Swizzle(AddressOf(operand) + static_cast<uint32_t>(row * span + k), span));
}

static inline void WgmmaInt8(float (&c)[64], uint64_t a, uint64_t b) {
  const auto lane = static_cast<int>(test::emulated_sm90::Lane()),
             warp = static_cast<int>(test::emulated_sm90::Thread().x) / 32 % 4;
  for (int i = 0; i < 64; ++i) {
    const int row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    int32_t sum = __float_as_int(c[i]);
    for (int k = 0; k < 32; ++k) sum += InnerByte<int8_t>(a, row, k) * InnerByte<int8_t>(b, column, k);
    std::memcpy(&c[i], &sum, sizeof sum);
  }
}
// Register 0 of A has columns 4 t to 4 t + 3 of row g, 1 of row g + 8, 2 and 3 those 16 columns further.
static inline void WgmmaFp8(float (&c)[32], const uint32_t* a, uint64_t b, int add) {
  const QuadFragments quad = GatherQuad(a);
  const auto lane = static_cast<int>(test::emulated_sm90::Lane());
  for (int i = 0; i < 32; ++i) {
    const int r = i % 4 / 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add != 0 ? c[i] : 0.0f;
    for (int k = 0; k < 32; ++k) {
      const uint32_t word = quad.of[k % 16 / 4][k / 16 * 2 + r];
      sum += test::FromFloat8(word >> k % 4 * 8 & 0xff) * test::FromFloat8(InnerByte<uint8_t>(b, column, k));
    }
    c[i] = sum;
  }
}
static inline uint32_t PackFp8(float x0, float x1, float x2, float x3) {
  return test::ToFloat8(x0) | test::ToFloat8(x1) << 8 | test::ToFloat8(x2) << 16 | test::ToFloat8(x3) << 24;
}

}  // namespace cuda
}  // namespace stof
