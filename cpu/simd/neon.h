// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CPU_SIMD_NEON_H_
#define STOF_CPU_SIMD_NEON_H_

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace stof {
namespace cpu {
namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr bool kHasFma = true;
  // Attention and GEMM: 6 × 4 accumulators, 6 vectors whose lanes multiply (lanes.h) and 2 operands: 32 of 32
  // registers.
  static constexpr int kVectors = 4;
  // Keys in place that four rows take at a time: 16 sums, 4 keys and a row: 21 of 32 registers.
  static constexpr int kKeysOfFourRows = 4;
  // Packed GEMM: 6 × 4 accumulators, as above.
  static constexpr int kTileRows = 6, kTileVectors = 4;
  // Sparse MLP, tokens and panels of tokens of a dot product, vectors of a row, tokens of a down row: 4 × 6
  // accumulators, 6 operands and a row: 31 of 32 registers. 8 × 2, 2 operands and 2 vectors of factors: 20.
  static constexpr int kDotTokens = 6, kDotPanels = 1, kPairVectors = 8, kDownTokens = 8;
  static constexpr int kPanelRows = 6;  // of a tile of panels, see RowsOfTile
  // The compiler's own vector type, as in portable.h: the operators of math.h mean the same with GCC and Clang.
  typedef float V __attribute__((vector_size(16)));
  using M = uint32x4_t;

  static V Load(const float* p) { return vld1q_f32(p); }
  static void Store(float* p, V v) { vst1q_f32(p, v); }
  // The first `count` values, zeros beyond; 1 <= count <= kWidth.
  static V LoadSome(const float* p, int count) {
    if (count == kWidth) return Load(p);
    const float32x2_t none = vdup_n_f32(0.0f);
    if (count == 1) return vcombine_f32(vld1_lane_f32(p, none, 0), none);
    return vcombine_f32(vld1_f32(p), count == 3 ? vld1_lane_f32(p + 2, none, 0) : none);
  }
  static void StoreSome(float* p, V v, int count) {
    if (count == kWidth) return Store(p, v);
    if (count == 1) return vst1q_lane_f32(p, v, 0);
    vst1_f32(p, vget_low_f32(v));
    if (count == 3) vst1q_lane_f32(p + 2, v, 2);
  }
  static V Set1(float x) { return vdupq_n_f32(x); }
  static V Add(V a, V b) { return vaddq_f32(a, b); }
  static V Sub(V a, V b) { return vsubq_f32(a, b); }
  static V Mul(V a, V b) { return vmulq_f32(a, b); }
  static V Div(V a, V b) { return vdivq_f32(a, b); }
  static V Fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
  static float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static V Fms(V a, V b, V c) { return vfmaq_f32(vnegq_f32(c), a, b); }  // a * b - c
  static float Fms(float a, float b, float c) { return __builtin_fmaf(a, b, -c); }
  // a * lane kLane of b + c, in one instruction.
  template <int kLane>
  static V FmaLane(V a, V b, V c) {
    return vfmaq_laneq_f32(c, a, b, kLane);
  }
  static V Sqrt(V v) { return vsqrtq_f32(v); }
  static V Floor(V v) { return vrndmq_f32(v); }
  static V Ceil(V v) { return vrndpq_f32(v); }
  static V Round(V v) { return vrndnq_f32(v); }  // ties to even
  // FMAX and FMIN give NaN where either is NaN, and 0 for 0 and -0: a comparison and a choice are the other sets'
  // result.
  static V Max(V a, V b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // b where either is NaN
  static V Min(V a, V b) { return vbslq_f32(vcltq_f32(a, b), a, b); }  // likewise
  static M Greater(V a, V b) { return vcgtq_f32(a, b); }
  static M GreaterEqual(V a, V b) { return vcgeq_f32(a, b); }
  static M Or(M a, M b) { return vorrq_u32(a, b); }
  static bool Any(M m) { return vmaxvq_u32(m) != 0; }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) {
    const uint32x4_t lane = {1, 2, 4, 8};
    return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), lane), a, b);
  }
  static V WhereEqual(V x, V y, V a, V b) { return vbslq_f32(vceqq_f32(x, y), a, b); }
  // Lane i: from[at[i] - base], which is below kWidth.
  static V Pick(const float* from, const int32_t* at, int32_t base) {
    const uint32x4_t lanes = vreinterpretq_u32_s32(vsubq_s32(vld1q_s32(at), vdupq_n_s32(base)));
    // Bytes 4 l ... 4 l + 3 of lane l.
    const uint32x4_t bytes = vmlaq_u32(vdupq_n_u32(0x03020100), lanes, vdupq_n_u32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(Load(from)), vreinterpretq_u8_u32(bytes)));
  }
  // The float whose bits are those of v shifted into the exponent.
  static V ShiftToExponent(V v) { return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(v), 23)); }
  static float ReduceAdd(V v) { return vaddvq_f32(v); }
  static float ReduceMax(V v) { return vmaxnmvq_f32(v); }  // of the lanes that are no NaN
};

// Four bytes, and zeros beyond.
inline uint8x8_t LoadFourBytes(const void* from) {
  uint32_t bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return vcreate_u8(bytes);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_NEON_H_
