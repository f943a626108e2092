// SPDX-License-Identifier: Apache-2.0
// Dot products of quantized rows and tokens that are quantized to int8, for accuracy_level 4. Included once per
// instruction set.
//
// In a block: scale of the row * scale of the token * (sum of q * x - zero point * sum of x), the sums in int32. Blocks
// are added in fp32, even and odd ones apart, in slabs of kInt8Depth values.
#ifndef STOF_CPU_SPARSE_MLP_DOTS_INT8_H_
#define STOF_CPU_SPARSE_MLP_DOTS_INT8_H_

#include <cmath>

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int64_t kInt8Depth = 4096;
constexpr int64_t kInt8Unit = 32;  // values that are multiplied at a time
constexpr int64_t kInt8Blocks = kInt8Depth / 16;

// Whether values of a unit have the even ones first: a byte of two 4-bit values then needs no unpacking.
inline bool HasEvenFirst(int bits, int64_t block) {
#if defined(__AVX2__)
  return bits == 4 && block >= kInt8Unit;
#else
  (void)bits, (void)block;
  return false;
#endif
}

// Quantizes one token of `size` values in blocks; zeros fill the last block. scales[i] is that of block i, and sums[i]
// its scale times the sum of its values.
inline void QuantizeToken(const float* x, int64_t size, int bits, int64_t block, int8_t* values, float* scales,
                          float* sums) {
  const bool has_even_first = HasEvenFirst(bits, block);
  for (int64_t first = 0, i = 0; first < size; first += block, ++i) {
    const int64_t count = std::min(block, size - first);
    float largest = 0.0f;
    for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::fabs(x[first + k]));
    const float scale = largest / 127.0f;
    // NaN and infinity cannot be quantized: they reach the result by the scale. So do values too small for a scale.
    const bool is_usual = scale > 0.0f && largest <= 3e38f;
    float inverse = is_usual ? 1.0f / scale : 0.0f;
    if (!(inverse <= 3e38f)) inverse = 0.0f;
    bool has_nan = !(largest <= 3e38f);
    int32_t sum = 0;
    for (int64_t k = 0; k < block; ++k) {
      int32_t q = 0;
      if (k < count) {
        has_nan = has_nan || x[first + k] != x[first + k];
        q = has_nan ? 0 : static_cast<int32_t>(std::nearbyintf(x[first + k] * inverse));
      }
      const int64_t unit = k / kInt8Unit * kInt8Unit, in_unit = k - unit;
      const int64_t at = has_even_first ? unit + in_unit / 2 + in_unit % 2 * (kInt8Unit / 2) : k;
      values[first + at] = static_cast<int8_t>(q);
      sum += q;
    }
    scales[i] = has_nan ? std::nanf("") : scale;
    sums[i] = scales[i] * static_cast<float>(sum);
  }
}

// sums of q[k] * x[k] over a block, in the order of QuantizeToken.
#if defined(__AVX2__)
template <int kBits>
inline __m256i MultiplyUnit(const uint8_t* q, const int8_t* x) {
  if constexpr (kBits == 4) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    const __m256i values = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i pairs = _mm256_maddubs_epi16(values, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  } else {
    const auto half = [q, x](int i) {
      const __m256i values = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i)));
      const __m256i others = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i)));
      return _mm256_madd_epi16(values, others);
    };
    return _mm256_add_epi32(half(0), half(16));
  }
}

// Sum over blocks of factors[i] * (q · x of block i).
// kUnits: of a block; 0: any.
template <int kBits, int kUnits>
inline float MultiplyBlocks(const uint8_t* q, const int8_t* x, const float* factors, int64_t blocks, int64_t block) {
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  const int64_t units = kUnits > 0 ? kUnits : block / kInt8Unit;
  const auto add = [&](int64_t i, __m256* sum) {
    __m256i dots = MultiplyUnit<kBits>(q, x);
    q += kInt8Unit * kBits / 8, x += kInt8Unit;
    for (int64_t u = 1; u < units; ++u) {
      dots = _mm256_add_epi32(dots, MultiplyUnit<kBits>(q, x));
      q += kInt8Unit * kBits / 8, x += kInt8Unit;
    }
    *sum = _mm256_fmadd_ps(_mm256_set1_ps(factors[i]), _mm256_cvtepi32_ps(dots), *sum);
  };
  int64_t i = 0;
  for (; i + 2 <= blocks; i += 2) {
    add(i, &sums[0]);
    add(i + 1, &sums[1]);
  }
  if (i < blocks) add(i, &sums[0]);
  const __m256 sum = _mm256_add_ps(sums[0], sums[1]);
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
#endif

inline float MultiplyBlocksOneByOne(const uint8_t* q, int bits, const int8_t* x, const float* factors, int64_t blocks,
                                    int64_t block) {
  float sum = 0.0f;
  for (int64_t i = 0; i < blocks; ++i) {
    int32_t dot = 0;
    for (int64_t k = i * block; k < (i + 1) * block; ++k) dot += QuantizedAt(q, bits, k) * x[k];
    sum += factors[i] * static_cast<float>(dot);
  }
  return sum;
}

inline float MultiplyAll(const NeuronRows& rows, const uint8_t* q, const int8_t* x, const float* factors,
                         int64_t blocks) {
#if defined(__AVX2__)
  if (rows.block == kInt8Unit) {
    return rows.bits == 4 ? MultiplyBlocks<4, 1>(q, x, factors, blocks, rows.block)
                          : MultiplyBlocks<8, 1>(q, x, factors, blocks, rows.block);
  }
  if (rows.block > kInt8Unit) {
    return rows.bits == 4 ? MultiplyBlocks<4, 0>(q, x, factors, blocks, rows.block)
                          : MultiplyBlocks<8, 0>(q, x, factors, blocks, rows.block);
  }
#endif
  return MultiplyBlocksOneByOne(q, rows.bits, x, factors, blocks, rows.block);
}

// factors[n] = scales[n] * of[n]; returns the sum of scales[n] * zeros[n] * sums[n], zeros of nullptr all being `zero`.
inline float ScaleBlocks(const float* scales, const float* zeros, float zero, const float* of, const float* sums,
                         int64_t count, float* factors) {
  V total = Simd::Set1(0.0f);
  int64_t n = 0;
  for (; n + kWidth <= count; n += kWidth) {
    const V scale = Simd::Load(scales + n);
    Simd::Store(factors + n, Simd::Mul(scale, Simd::Load(of + n)));
    const V points = zeros != nullptr ? Simd::Load(zeros + n) : Simd::Set1(zero);
    total = Simd::Fma(Simd::Mul(scale, points), Simd::Load(sums + n), total);
  }
  float correction = Simd::ReduceAdd(total);
  for (; n < count; ++n) {
    factors[n] = scales[n] * of[n];
    correction += scales[n] * (zeros != nullptr ? zeros[n] : zero) * sums[n];
  }
  return correction;
}

// Row i and every token that needs it.
inline void DotRowInt8(const DotProblem& p, int64_t i, float* out, int64_t token_stride) {
  const NeuronRows& rows = p.rows;
  const int64_t neuron = p.neurons != nullptr ? p.neurons[i] : i;
  const int64_t blocks = rows.blocks, item = SizeOf(rows.dtype);
  const auto* const row = reinterpret_cast<const uint8_t*>(rows.data + neuron * rows.stride);
  const uint64_t all = p.tokens == kMlpTokens ? ~uint64_t{0} : (uint64_t{1} << p.tokens) - 1;
  const uint64_t mask = p.masks == nullptr ? all : p.masks[i];
  for (uint64_t left = mask; left != 0; left &= left - 1) out[__builtin_ctzll(left) * token_stride] = 0.0f;
  float converted[kInt8Blocks], zeros[kInt8Blocks], factors[kInt8Blocks];
  const float zero = rows.bits == 4 ? 8.0f : 128.0f;
  const int64_t per_slab = kInt8Depth >> rows.block_shift;
  for (int64_t first = 0; first < blocks; first += per_slab) {
    const int64_t count = std::min(per_slab, blocks - first);
    const uint8_t* const q = row + first * rows.block * rows.bits / 8;
    const char* const scales = rows.scales + (rows.has_row_scales ? neuron : neuron * blocks + first) * item;
    const auto* own = reinterpret_cast<const float*>(scales);
    if (!rows.has_row_scales && rows.dtype != DType::kF32) {
      ToFloats(scales, rows.dtype, count, converted);
      own = converted;
    }
    if (rows.zero_points != nullptr) {
      const uint8_t* const points = rows.zero_points + neuron * ((blocks * rows.bits + 7) / 8);
      for (int64_t n = 0; n < count; ++n) zeros[n] = QuantizedAt(points, rows.bits, first + n);
    }
    for (uint64_t left = mask; left != 0; left &= left - 1) {
      const int t = __builtin_ctzll(left);
      const int8_t* const x = p.x_int8 + t * p.x_int8_stride + first * rows.block;
      const float* const token_scales = p.x_scales + t * p.x_scales_stride + first;
      const float* const token_sums = p.x_sums + t * p.x_scales_stride + first;
      float& to = out[t * token_stride];
      if (rows.has_row_scales) {
        const float correction = first == 0 ? zero * p.x_totals[t] : 0.0f;
        to += ToFloat(scales, rows.dtype, 0) * (MultiplyAll(rows, q, x, token_scales, count) - correction);
        continue;
      }
      const float correction = ScaleBlocks(own, rows.zero_points != nullptr ? zeros : nullptr, zero, token_scales,
                                           token_sums, count, factors);
      to += MultiplyAll(rows, q, x, factors, count) - correction;
    }
  }
}

inline void DotsInt8(const DotProblem& p, int64_t first, int64_t last, float* out, int64_t row_stride,
                     int64_t token_stride) {
  constexpr int64_t kAhead = 4, kLine = 64;
  const NeuronRows& rows = p.rows;
  const int64_t blocks = rows.has_row_scales ? 1 : rows.blocks;
  const int64_t scale_bytes = blocks * SizeOf(rows.dtype);
  for (int64_t i = first; i < last; ++i) {
    const int64_t ahead = std::min(i + kAhead, p.count - 1);
    const int64_t neuron = p.neurons != nullptr ? p.neurons[ahead] : ahead;
    // Rows are too short for the hardware to prefetch.
    for (int64_t at = 0; at < rows.stride; at += kLine) {
      __builtin_prefetch(rows.data + neuron * rows.stride + at, 0, 2);
    }
    for (int64_t at = 0; at < scale_bytes; at += kLine) {
      __builtin_prefetch(rows.scales + neuron * scale_bytes + at, 0, 2);
    }
    DotRowInt8(p, i, out + (i - first) * row_stride, token_stride);
  }
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOTS_INT8_H_
