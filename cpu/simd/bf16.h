// SPDX-License-Identifier: Apache-2.0
// bf16 numbers, and rounding to them by the instructions of the set that a source is compiled for.
#ifndef STOF_CPU_SIMD_BF16_H_
#define STOF_CPU_SIMD_BF16_H_

#include <cstdint>
#include <cstring>

#include "cpu/simd/convert.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

// bf16 is moved as floats of two numbers by functions that pack fp32.
typedef uint16_t Bf16 __attribute__((may_alias));

// Rounds to nearest even; NaN stays NaN. Instructions take subnormal numbers as 0.
inline void RoundToBf16(const float* from, int64_t count, Bf16* to) {
  int64_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 16 <= count; i += 16) {
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(to + i),
                        reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i))));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  for (; i + 4 <= count; i += 4) {
    vst1_bf16(reinterpret_cast<bfloat16_t*>(to + i), vcvt_bf16_f32(vld1q_f32(from + i)));
  }
#endif
  for (; i < count; ++i) to[i] = FloatToBfloat16(from[i]);
}

// The same of fp32 and fp16; bf16 is copied.
inline void ToBf16(const void* source, DType dtype, int64_t count, Bf16* to) {
  if (dtype == DType::kF32) return RoundToBf16(static_cast<const float*>(source), count, to);
  const auto* const from = static_cast<const uint16_t*>(source);
  if (dtype == DType::kBF16) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(Bf16));
    return;
  }
  constexpr int64_t kStep = 64;
  float wide[kStep];
  for (int64_t i = 0; i < count; i += kStep) {
    const int64_t some = count - i < kStep ? count - i : kStep;
    ToFloats(from + i, dtype, some, wide);
    RoundToBf16(wide, some, to + i);
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_BF16_H_
