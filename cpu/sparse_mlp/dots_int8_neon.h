// SPDX-License-Identifier: Apache-2.0
// Products of bytes by vectors of NEON, and what dots_int8_vectors.h asks of an instruction set.
//
// Quantized values of 8 bits are multiplied as signed bytes, less 128: the dot-product extension has `sdot`, which
// multiplies signed bytes, while a product of unsigned and signed bytes (`usdot`) needs a later extension. Without
// `sdot` products are widened and added in pairs. Both give the same integers.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_INT8_NEON_H_
#define STOF_CPU_SPARSE_MLP_DOTS_INT8_NEON_H_

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace {

// Four sums of products of bytes: lane i adds those of byte 4 i to 4 i + 3.
class ByteSums {
 public:
#if defined(__ARM_FEATURE_DOTPROD)
  void Add(int8x16_t a, int8x16_t b) { sums_ = vdotq_s32(sums_, a, b); }
  int32x4_t Value() const { return sums_; }

 private:
  int32x4_t sums_ = {};
#else
  void Add(int8x16_t a, int8x16_t b) {  // a product has at most 15 bits and a sign
    low_ = vpadalq_s16(low_, vmull_s8(vget_low_s8(a), vget_low_s8(b)));
    high_ = vpadalq_s16(high_, vmull_high_s8(a, b));
  }
  int32x4_t Value() const { return vpaddq_s32(low_, high_); }

 private:
  int32x4_t low_ = {}, high_ = {};  // of bytes 0 to 7 and 8 to 15: lane i adds bytes 2 i and 2 i + 1
#endif
};

// Bytes less 128, as signed ones.
inline int8x16_t SubtractOffset(uint8x16_t bytes) { return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(0x80))); }

// RoundToInt8 by vectors of 8: returns how many values are written, and adds them to *sum.
inline int64_t RoundVectorsToInt8(const float* x, int64_t count, float inverse, int8_t* values, int32_t* sum) {
  int32x4_t sums = vdupq_n_s32(0);
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k), inverse));
    const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k + 4), inverse));
    sums = vaddq_s32(sums, vaddq_s32(low, high));
    vst1_s8(values + k, vmovn_s16(vcombine_s16(vmovn_s32(low), vmovn_s32(high))));
  }
  *sum += vaddvq_s32(sums);
  return k;
}

// In each vector of 4-bit values the even ones come first: a byte of two values then needs no unpacking.
inline void PutEvenFirst(int64_t count, int8_t* values) {
  for (int64_t first = 0; first < count; first += 32) {
    const int8x16x2_t split = vld2q_s8(values + first);
    vst1q_s8(values + first, split.val[0]);
    vst1q_s8(values + first + 16, split.val[1]);
  }
}

using Int8Vector = uint8x16_t;
using LaneSums = float32x4_t;
constexpr int64_t kInt8Lanes = 4;

inline LaneSums NoSums() { return vdupq_n_f32(0.0f); }
inline float AddLanes(LaneSums x) { return vaddvq_f32(x); }

// `bytes` of a row, a multiple of 8 as blocks have; zeros beyond.
inline Int8Vector LoadBytes(const uint8_t* q, int64_t bytes) {
  if (bytes >= 16) return vld1q_u8(q);
  return vcombine_u8(vld1_u8(q), vdup_n_u8(0));
}

// The values of a vector of a row, ready to be multiplied.
template <int kBits>
struct RowVectorNeon {
  int8x16_t even, odd;
  explicit RowVectorNeon(Int8Vector q) {
    if constexpr (kBits == 4) {
      even = vreinterpretq_s8_u8(vandq_u8(q, vdupq_n_u8(15)));
      odd = vreinterpretq_s8_u8(vshrq_n_u8(q, 4));
    } else {
      even = odd = SubtractOffset(q);
    }
  }
  // Lane i: the sum of the products of byte 4i to 4i + 3.
  LaneSums Dot(const int8_t* x) const {
    ByteSums sums;
    sums.Add(even, vld1q_s8(x));
    if constexpr (kBits == 4) sums.Add(odd, vld1q_s8(x + 16));
    return vcvtq_f32_s32(sums.Value());
  }
};
template <int kBits>
using RowVector = RowVectorNeon<kBits>;

// The factor of each lane, where a vector covers kBlocks blocks.
template <int kBlocks>
inline LaneSums LaneFactors(const float* factors) {
  if constexpr (kBlocks == 1) {
    return vdupq_n_f32(*factors);
  } else {
    static_assert(kBlocks == 2, "32 values of 4 bits, in blocks of 16 or more");
    const float32x2_t both = vld1_f32(factors);
    return vcombine_f32(vdup_lane_f32(both, 0), vdup_lane_f32(both, 1));
  }
}

inline LaneSums SubtractProducts(const float* a, const float* b, LaneSums sums) {
  return vfmsq_f32(sums, vld1q_f32(a), vld1q_f32(b));
}
inline LaneSums AddScaled(LaneSums scale, const float* scales, LaneSums dots, LaneSums sums) {
  return vfmaq_f32(sums, vmulq_f32(scale, vld1q_f32(scales)), dots);
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_INT8_NEON_H_
