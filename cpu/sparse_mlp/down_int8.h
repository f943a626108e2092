// SPDX-License-Identifier: Apache-2.0
// Sums of quantized down rows with hidden values that are quantized to int8, for accuracy_level 4. Included once per
// instruction set.
//
// Neurons that share a scale are a group. A token's hidden values of a group have one scale of their own, as in
// ONNX Runtime's MatMulNBits. An output adds scale * hidden scale * (sum of q * h - zero point * sum of h) for each
// group, in their order; the sums are integers.
#ifndef STOF_CPU_SPARSE_MLP_DOWN_INT8_H_
#define STOF_CPU_SPARSE_MLP_DOWN_INT8_H_

#include <cmath>

#include "cpu/sparse_mlp/elements.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::sparse_mlp {

constexpr int64_t kPieceRows = 16;     // 8 pairs of at most 2 * 15 * 127: an int16 holds their sum
constexpr int64_t kMostGroup = 256;    // neurons that share a scale
constexpr int64_t kInt8Columns = 512;  // of a piece
constexpr int64_t kInt8Step = 64;      // columns that are summed at a time

// Some active neurons of a group for one token. Few rows at a time: those of a multiple of 4 KiB share cache sets.
struct QuantizedHidden {
  const uint8_t* rows[kPieceRows];  // at the first column; an even number of them, the last one may be repeated
  int8_t values[kPieceRows];        // 0 for a repeated row
  int16_t pairs[kPieceRows / 2];    // two values side by side
  int64_t count = 0;                // even
  float scale = 0.0f;
  float sum = 0.0f;  // of the values
};

// The scale of a group's hidden values, and what a value is multiplied by. NaN and infinity cannot be quantized: they
// reach the result by the scale.
inline void ScaleHidden(const float* h, int64_t count, float* scale, float* inverse) {
  float largest = 0.0f;
  bool has_nan = false;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, std::fabs(h[i]));
    has_nan = has_nan || h[i] != h[i];
  }
  has_nan = has_nan || !(largest <= 3e38f);
  *scale = has_nan ? std::nanf("") : largest / 127.0f;
  *inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  if (!(*inverse <= 3e38f)) *inverse = 0.0f;
}

// Quantizes to->count values.
inline void QuantizeHidden(const float* h, float inverse, QuantizedHidden* to) {
  int32_t sum = 0;
  for (int64_t i = 0; i < to->count; ++i) {
    const int32_t q = inverse == 0.0f ? 0 : static_cast<int32_t>(std::nearbyintf(h[i] * inverse));
    to->values[i] = static_cast<int8_t>(q);
    sum += q;
  }
  if (to->count % 2 == 1) {
    to->rows[to->count] = to->rows[to->count - 1];
    to->values[to->count++] = 0;
  }
  for (int64_t i = 0; i < to->count; i += 2) {
    const auto low = static_cast<uint8_t>(to->values[i]), high = static_cast<uint8_t>(to->values[i + 1]);
    to->pairs[i / 2] = static_cast<int16_t>(low | high << 8);
  }
  to->sum = static_cast<float>(sum);
}

// What comes next, at the first column: its lines are prefetched along the way.
struct NextGroup {
  const char* rows[kMostGroup];
  int64_t count = 0;
  const char* scales = nullptr;
  int64_t scale_size = 0;

  void Prefetch(int64_t n, int bits) const {
    constexpr int64_t kLine = 64;
    for (int64_t at = 0; at < kInt8Step * scale_size; at += kLine)
      __builtin_prefetch(scales + n * scale_size + at, 0, 2);
    if (n * bits / 8 % kLine != 0) return;
    for (int64_t i = 0; i < count; ++i) __builtin_prefetch(rows[i] + n * bits / 8, 0, 2);
  }
};

// Scales of a group, at the first column. zeros: nullptr: `zero` for all columns.
template <typename E>
struct GroupScales {
  const typename E::T* scales;
  const uint8_t* zeros;
  float zero;
};

#if defined(__AVX2__)
// sums[8] += scale * (dots - zero point * sum of h) for eight columns.
template <typename E>
inline void AddDots(__m256i dots, const GroupScales<E>& group, int64_t n, const QuantizedHidden& h, float* sums) {
  float scales[8];
  __m256 scale;
  if constexpr (E::kType == DType::kF32) {
    scale = _mm256_loadu_ps(group.scales + n);
  } else {
    ToFloats(group.scales + n, E::kType, 8, scales);
    scale = _mm256_loadu_ps(scales);
  }
  __m256 zero = _mm256_set1_ps(group.zero);
  if (group.zeros != nullptr) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(group.zeros + n));
    zero = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  }
  // Both are integers below 2^24: the difference is exact.
  const __m256 value = _mm256_fnmadd_ps(zero, _mm256_set1_ps(h.sum), _mm256_cvtepi32_ps(dots));
  const __m256 factor = _mm256_mul_ps(scale, _mm256_set1_ps(h.scale));
  _mm256_storeu_ps(sums + n, _mm256_fmadd_ps(factor, value, _mm256_loadu_ps(sums + n)));
}

// kInt8Step columns from n on, of 4 bits.
template <typename E>
inline void AddColumns4(const QuantizedHidden& h, const GroupScales<E>& group, int64_t n, float* sums) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i even[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  __m256i odd[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int64_t i = 0; i < h.count; i += 2) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h.rows[i] + n / 2));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(h.rows[i + 1] + n / 2));
    const __m256i factor = _mm256_set1_epi16(h.pairs[i / 2]);
    const __m256i a_even = _mm256_and_si256(a, low), b_even = _mm256_and_si256(b, low);
    const __m256i a_odd = _mm256_and_si256(_mm256_srli_epi16(a, 4), low);
    const __m256i b_odd = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
    even[0] = _mm256_add_epi16(even[0], _mm256_maddubs_epi16(_mm256_unpacklo_epi8(a_even, b_even), factor));
    even[1] = _mm256_add_epi16(even[1], _mm256_maddubs_epi16(_mm256_unpackhi_epi8(a_even, b_even), factor));
    odd[0] = _mm256_add_epi16(odd[0], _mm256_maddubs_epi16(_mm256_unpacklo_epi8(a_odd, b_odd), factor));
    odd[1] = _mm256_add_epi16(odd[1], _mm256_maddubs_epi16(_mm256_unpackhi_epi8(a_odd, b_odd), factor));
  }
  for (int i = 0; i < 2; ++i) {
    // Columns 16 i ... 16 i + 15 in the low lanes, 32 more in the high ones.
    const __m256i first8 = _mm256_unpacklo_epi16(even[i], odd[i]), second8 = _mm256_unpackhi_epi16(even[i], odd[i]);
    const auto add = [&](int64_t at, __m128i words) { AddDots(_mm256_cvtepi16_epi32(words), group, n + at, h, sums); };
    add(16 * i, _mm256_castsi256_si128(first8));
    add(16 * i + 8, _mm256_castsi256_si128(second8));
    add(16 * i + 32, _mm256_extracti128_si256(first8, 1));
    add(16 * i + 40, _mm256_extracti128_si256(second8, 1));
  }
}

// The same of 8 bits.
template <typename E>
inline void AddColumns8(const QuantizedHidden& h, const GroupScales<E>& group, int64_t n, float* sums) {
  for (int64_t c = n; c < n + kInt8Step; c += 16) {
    __m256i dots[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    for (int64_t i = 0; i < h.count; i += 2) {
      const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h.rows[i] + c)));
      const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(h.rows[i + 1] + c)));
      const __m256i factor =
          _mm256_set1_epi32(static_cast<uint16_t>(h.values[i]) | static_cast<int32_t>(h.values[i + 1]) * 65536);
      dots[0] = _mm256_add_epi32(dots[0], _mm256_madd_epi16(_mm256_unpacklo_epi16(a, b), factor));
      dots[1] = _mm256_add_epi32(dots[1], _mm256_madd_epi16(_mm256_unpackhi_epi16(a, b), factor));
    }
    // Columns 0 to 3 and 8 to 11, 4 to 7 and 12 to 15.
    AddDots(_mm256_permute2x128_si256(dots[0], dots[1], 0x20), group, c, h, sums);
    AddDots(_mm256_permute2x128_si256(dots[0], dots[1], 0x31), group, c + 8, h, sums);
  }
}
#endif

// sums[n] for columns [0, columns): those of the group's rows, which begin at an even column.
template <typename E>
void AddGroup(const QuantizedHidden& h, int bits, const GroupScales<E>& group, int64_t columns, const NextGroup* next,
              float* sums) {
  int64_t n = 0;
  (void)next;
#if defined(__AVX2__)
  for (; n + kInt8Step <= columns; n += kInt8Step) {
    if (next != nullptr) next->Prefetch(n, bits);
    if (bits == 4) {
      AddColumns4(h, group, n, sums);
    } else {
      AddColumns8(h, group, n, sums);
    }
  }
#endif
  for (; n < columns; ++n) {
    int32_t dot = 0;
    for (int64_t i = 0; i < h.count; ++i) dot += QuantizedAt(h.rows[i], bits, n) * h.values[i];
    const float zero = group.zeros == nullptr ? group.zero : static_cast<float>(group.zeros[n]);
    const float factor = ToFloat(group.scales, E::kType, n) * h.scale;
#if defined(__AVX2__)
    sums[n] = std::fma(factor, static_cast<float>(dot) - zero * h.sum, sums[n]);
#else
    sums[n] += factor * (static_cast<float>(dot) - zero * h.sum);
#endif
  }
}

inline void DownInt8(const MlpBlock& b, int64_t part, int64_t begin, int64_t end) {
  const NeuronRows& down = b.down;
  const int64_t N = b.args->N, last = b.part_begin[part + 1], item = SizeOf(down.dtype);
  float* const sums = b.sums + part * b.tokens * N;
  for (int64_t t = 0; t < b.tokens; ++t) std::fill(sums + t * N + begin, sums + t * N + end, 0.0f);
  const int64_t step = b.tokens <= 2 ? std::max<int64_t>(1, end - begin) : kInt8Columns;
  const auto end_of_group = [&](int64_t i) {
    const int64_t group = b.neurons[i] >> down.block_shift;
    while (i < last && b.neurons[i] >> down.block_shift == group) ++i;
    return i;
  };
  QuantizedHidden hidden;
  for (int64_t n = begin; n < end; n += step) {
    const int64_t columns = std::min(step, end - n), bytes = n * down.bits / 8;
    for (int64_t first = b.part_begin[part]; first < last;) {
      const int64_t behind = end_of_group(first), group = b.neurons[first] >> down.block_shift;
      NextGroup next_group;
      if (behind < last) {
        next_group.scale_size = item;
        next_group.scales = down.scales + ((b.neurons[behind] >> down.block_shift) * N + n) * item;
        for (int64_t i = behind, end_of_next = end_of_group(behind); i < end_of_next; ++i) {
          next_group.rows[next_group.count++] = down.data + b.neurons[i] * down.stride + bytes;
        }
      }
      const NextGroup* next = behind < last ? &next_group : nullptr;
      for (int64_t t = 0; t < b.tokens; ++t) {
        const uint8_t* rows[kMostGroup];
        float h[kMostGroup];
        int64_t count = 0;
        for (int64_t i = first; i < behind; ++i) {
          if ((b.list_masks[i] >> t & 1) == 0) continue;
          rows[count] = reinterpret_cast<const uint8_t*>(down.data) + b.neurons[i] * down.stride + bytes;
          h[count++] = b.hidden[i * b.tokens + t];
        }
        if (count == 0) continue;
        float inverse = 0.0f;
        ScaleHidden(h, count, &hidden.scale, &inverse);
        for (int64_t i = 0; i < count; i += kPieceRows) {
          hidden.count = std::min(kPieceRows, count - i);
          std::copy(rows + i, rows + i + hidden.count, hidden.rows);
          QuantizeHidden(h + i, inverse, &hidden);
          WithElement(down.dtype, [&](auto element) {
            using E = decltype(element);
            const GroupScales<E> scales = {reinterpret_cast<const typename E::T*>(down.scales) + group * N + n,
                                           down.zero_points == nullptr ? nullptr : down.zero_points + group * N + n,
                                           down.bits == 4 ? 8.0f : 128.0f};
            AddGroup(hidden, down.bits, scales, columns, next, sums + t * N + n);
          });
          next = nullptr;
        }
      }
      first = behind;
    }
  }
}

}  // namespace STOF_ISA::sparse_mlp
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SPARSE_MLP_DOWN_INT8_H_
