// SPDX-License-Identifier: Apache-2.0
// In place of headers of the split-KV decode kernel, whose guards it defines: without sinks, softcap and LSE, with
// biases of fp32. Included before the kernel.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define STOF_CUDA_ATTENTION_DECODE_COMMON_CUH_
#define STOF_CUDA_ATTENTION_DECODE_LOAD_ONCE_CUH_
#define STOF_CUDA_COMMON_QUANTIZED_CUH_

struct alignas(8) float2 {
  float x, y;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
template <typename T>
static T __ldg(const T* from) {
  return *from;
}
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __shfl_sync(unsigned, float value, int source) {
  uint32_t values[32];
  stof::test::emulated_sm80::Cta::Exchange(__float_as_uint(value), values);
  return __uint_as_float(values[source]);
}
static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selected) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(both >> 8 * (selected >> 4 * i & 7u) & 0xffu) << 8 * i;
  }
  return result;
}

#include "cuda/attention/decode/api.h"
#include "cuda/attention/sm80/shape.cuh"

namespace stof {
namespace cuda {

// ---- what no case calls ----
template <typename T, typename Stored>
struct Unpack {
  static void Run(uint32_t, uint32_t (&)[2]) {}
};
static inline void SplitTf32(uint32_t, uint32_t*, uint32_t*) {}
static inline void MmaTf32(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]) {}
static inline int LayoutPlace(const DecodeParams&, int, int) { return 0; }
static inline int MaskRow(const DecodeParams&, int, int query) { return query; }
template <typename T>
static float SinkWeight(const AttentionParams&, int, float) {
  return 0.0f;
}
template <typename T>
static void StoreLse(const AttentionParams&, int, int, int, float, float) {}
static inline float EmptyValue(const AttentionParams&) { return 0.0f; }
static inline int32_t ReadInvalid(const DecodeParams&, int) { return 0; }

// ---- cuda/attention/decode/common.cuh ----
static inline int32_t ReadWord(const int32_t* from) { return *from; }
static inline bool CanReadAhead(const DecodeParams&) { return false; }
static inline int ReadFirstRow(const DecodeParams& params, int b) { return params.first_rows[b]; }
static inline bool HasScoreMod(const AttentionParams& p) { return p.bias != nullptr; }
static inline int64_t PackedRow(const AttentionParams& p, int b, int head0, int row) {
  return (int64_t{b} * p.H + head0 + row / p.S) * p.S + row % p.S;
}
template <typename T>
static T FromFloat(float x) {
  return Round<T>(x);
}
template <typename T>
static float ApplyScoreMod(const AttentionParams& p, float x, int b, int h, int query, int key) {
  const int64_t at =
      b * p.bias_stride_b + h * p.bias_stride_h + query * p.bias_stride_q + min(key, p.T - 1) * p.bias_stride_k;
  return (x + static_cast<const float*>(p.bias)[at]) * kLog2E;
}
// movmatrix: lane l gets two values of row l / 4 of the transposed matrix.
static inline uint32_t Transpose(uint32_t x) {
  uint32_t values[32], y = 0;
  test::emulated_sm80::Cta::Exchange(x, values);
  const int lane = static_cast<int>(threadIdx.x % 32), column = lane / 4;
  for (int i = 0; i < 2; ++i) {
    const int row = lane % 4 * 2 + i;
    y |= (values[row * 4 + column / 2] >> 16 * (column % 2) & 0xffffu) << 16 * i;
  }
  return y;
}

// ---- cuda/common/mma_sm80.cuh ----
template <typename T>
static uint32_t Pack(float low, float high) {
  return RoundToBf16(low) | RoundToBf16(high) << 16;
}
static inline float Exp2(float x) { return std::exp2(x); }

// ---- cuda/attention/decode/load_once.cuh ----
template <int kWords>
static void LoadOnce(uint32_t (&r)[kWords], const void* from, bool valid) {
  std::memset(r, 0, sizeof r);
  if (valid) std::memcpy(r, from, sizeof r);
}

}  // namespace cuda
}  // namespace stof
