// SPDX-License-Identifier: Apache-2.0
// What both decode kernels share: TF32 matmuls, score modification, values of fully masked rows.
#ifndef STOF_CUDA_ATTENTION_DECODE_COMMON_CUH_
#define STOF_CUDA_ATTENTION_DECODE_COMMON_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/far_scores.cuh"
#include "cuda/attention/lse.cuh"
#include "cuda/attention/sm80/shape.cuh"

namespace stof {
namespace cuda {

// For data of the previous kernel: the compiler may move __ldg in front of the wait for it.
__device__ __forceinline__ int32_t ReadWord(const int32_t* from) {
  int32_t x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

// Transposes an 8 x 8 matrix of 16-bit values, of which lane l holds two in row l / 4.
__device__ __forceinline__ uint32_t Transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ uint32_t ToTf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ void SplitTf32(uint32_t bits, uint32_t* big, uint32_t* small) {
  const float x = __uint_as_float(bits);
  *big = ToTf32(x);
  *small = ToTf32(x - __uint_as_float(*big));
}
// c[16 x 8] += a[16 x 8] · b[8 x 8], TF32.
__device__ __forceinline__ void MmaTf32(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half FromFloat<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 FromFloat<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The index in [B, H, S] of a packed row of the heads from head0 on.
__device__ __forceinline__ int64_t PackedRow(const AttentionParams& p, int b, int head0, int row) {
  return (static_cast<int64_t>(b) * p.H + head0 + row / p.S) * p.S + row % p.S;
}

// The place of head0 and the heads packed with it in a mask's layout; and the row of a query of one of them in a tile.
__device__ __forceinline__ int LayoutPlace(const DecodeParams& params, int b, int head0) {
  const DeviceMask& mask = params.attention.mask;
  const int head = mask.layout_h == 1 ? 0 : params.stacked != 0 ? head0 / params.heads : head0;
  return (mask.layout_b == 1 ? 0 : b) * mask.layout_h + head;
}
__device__ __forceinline__ int MaskRow(const DecodeParams& params, int packed_head, int query) {
  return params.stacked != 0 ? packed_head * params.attention.S + query : query;
}

// Whether a kernel may read seqlens and the keys below the new ones before the previous kernel ends.
__device__ __forceinline__ bool CanReadAhead(const DecodeParams& params) {
  return params.seqlens != nullptr && params.first_rows != nullptr && params.second_pass == 0;
}
// The row of the first new key of a sequence, by seqlens where given: the previous kernel may still write first_rows.
// Of a sequence that is invalid it may be any row.
__device__ __forceinline__ int ReadFirstRow(const DecodeParams& params, int b) {
  return params.seqlens != nullptr ? max(ReadWord(params.seqlens + b), -kNoWindow) + 1 - params.attention.S
                                   : ReadWord(params.first_rows + b);
}

// Not 0: the outputs of a sequence are to be NaN. Callers compare it where they need it: the load takes its time.
__device__ __forceinline__ int32_t ReadInvalid(const DecodeParams& params, int b) {
  return params.is_invalid == nullptr ? 0 : params.is_invalid[b];
}

__device__ __forceinline__ bool HasScoreMod(const AttentionParams& p) {
  return p.softcap > 0.0f || p.bias != nullptr || p.relative_bias != nullptr;
}

// The output of a fully masked row. Under kAll every bias is -inf, so that the softmax of all keys is NaN.
__device__ __forceinline__ float EmptyValue(const AttentionParams& p) {
  const auto policy = static_cast<EmptyRows>(p.empty_rows);
  return p.T > 0 && (policy == EmptyRows::kNan || policy == EmptyRows::kAll) ? NAN : 0.0f;
}

template <typename T>
__device__ __forceinline__ float SinkWeight(const AttentionParams& p, int h, float maximum) {
  if (p.sink == nullptr) return 0.0f;
  const float logit =
      p.sink_is_float != 0 ? static_cast<const float*>(p.sink)[h] : ToFloat(static_cast<const T*>(p.sink)[h]);
  return Exp2(fminf(ScoreDifference(logit * kLog2E, maximum), 127.0f));
}

// Applies softcap and biases to a score; gives units of log2.
template <typename T>
__device__ float ApplyScoreMod(const AttentionParams& p, float x, int b, int h, int query, int key) {
  key = min(key, p.T - 1);
  if (p.softcap > 0.0f) x = p.softcap * tanhf(x / p.softcap);
  float bias = 0.0f;
  if (p.bias != nullptr) {
    const int64_t at = b * p.bias_stride_b + h * p.bias_stride_h + query * p.bias_stride_q + key * p.bias_stride_k;
    bias = p.bias_is_float != 0 ? static_cast<const float*>(p.bias)[at] : ToFloat(static_cast<const T*>(p.bias)[at]);
  }
  if (p.relative_bias != nullptr) {
    const int radius = static_cast<int>(p.relative_bias_size / 2);
    const int distance = max(-radius, min(radius, key - (p.query_position + query)));
    bias += p.relative_bias[h * p.relative_bias_stride_h + radius + distance];
  }
  // The lowest finite bias is no mask: it must not become -inf in units of log2. NaN stays NaN.
  const float natural = x + bias;
  float sum = natural * kLog2E;
  if (sum == -INFINITY && natural != -INFINITY) sum = kLowest;
  return bias == -INFINITY ? -INFINITY : sum;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_COMMON_CUH_
