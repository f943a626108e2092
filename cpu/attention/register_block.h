// SPDX-License-Identifier: Apache-2.0
// Register-blocked microkernels of attention: QK^T and PV of a few query rows with all accumulators in registers, and
// the packing of keys.
#ifndef STOF_CPU_ATTENTION_REGISTER_BLOCK_H_
#define STOF_CPU_ATTENTION_REGISTER_BLOCK_H_

#include <cstdint>

#include "cpu/attention/attention.h"
#include "cpu/simd/algorithms.h"
#include "cpu/simd/lanes.h"
#include "cpu/simd/math.h"
#include "cpu/simd/quantized.h"

namespace stof {
namespace cpu {
namespace {

constexpr int kVectors = Simd::kVectors;

// A run of adjacent keys of a tile, [first, last).
struct Run {
  int first, last;
};

// QK^T: s[kRows, kBlock vectors] = q[kRows, size] · keys + start[kRows]. A vector holds kWidth of the kPanel keys of a
// packed panel.
template <int kRows, int kBlock>
__attribute__((noinline)) void Scores(const float* q, int64_t ldq, int64_t size, const float* keys,
                                      int64_t panel_stride, const float* start, float* s, int64_t lds) {
  constexpr int kPerPanel = kPanel / kWidth;
  V sum[kRows][kBlock];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Set1(start[r]);
  }
  int64_t d = 0;
#if defined(STOF_NEON)
  for (; d + 4 <= size; d += 4) {
    AddFourSteps(
        [&](int r) { return Simd::Load(q + r * ldq + d); },
        [&](int step, int j) {
          return Simd::Load(keys + (d + step) * kPanel + j / kPerPanel * panel_stride + j % kPerPanel * kWidth);
        },
        sum);
  }
#endif
#pragma GCC unroll 4
  for (; d < size; ++d) {
    V key[kBlock];
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) {
      key[j] = Simd::Load(keys + d * kPanel + (j / kPerPanel) * panel_stride + (j % kPerPanel) * kWidth);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const V x = Simd::Set1(q[r * ldq + d]);
#pragma GCC unroll 4
      for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Fma(x, key[j], sum[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; ++j) Simd::Store(s + r * lds + j * kWidth, sum[r][j]);
  }
}

// QK^T of keys in place: s[kRows, kKeys] = q[kRows, size] · keys[kKeys, size] + start[kRows]; size is whole vectors.
// Stored: float, or a quantized type, which becomes fp32 as it is loaded.
template <int kRows, int kKeys, typename Stored>
inline void DotRows(const float* q, int64_t ldq, int64_t size, const Stored* keys, int64_t ldk, const float* start,
                    float* s, int64_t lds) {
  V sum[kRows][kKeys];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) sum[r][j] = Simd::Set1(0.0f);
  }
  for (int64_t d = 0; d < size; d += kWidth) {
    V key[kKeys];
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) key[j] = LoadFloats(keys + j * ldk + d);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const V x = Simd::Load(q + r * ldq + d);
#pragma GCC unroll 8
      for (int j = 0; j < kKeys; ++j) sum[r][j] = Simd::Fma(x, key[j], sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) s[r * lds + j] = start[r] + Simd::ReduceAdd(sum[r][j]);
  }
}

inline void Prefetch(const char* at, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// PV: o[kRows, kBlock vectors] += p[kRows, keys of the runs] · v. The tile's matmul is summed by itself first: in one
// chain of additions through all keys the terms of a long row would lose their low bits, each time in the same
// direction. kAhead: brings as many bytes from `ahead` on to the L2 cache, one after the other. Stored: as of DotRows.
template <int kRows, int kBlock, bool kAhead, typename Stored>
__attribute__((noinline)) void AddValues(const float* p, int64_t ldp, const Run* runs, int count, const Stored* v,
                                         int64_t ldv, float* o, int64_t ldo, const char* ahead = nullptr) {
  V sum[kRows][kBlock];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Set1(0.0f);
  }
  for (int i = 0; i < count; ++i) {
    const int64_t last = runs[i].last;
    const Stored* value = v + runs[i].first * ldv;
    constexpr int64_t kBytes = kBlock * kWidth * static_cast<int64_t>(sizeof(Stored));
    int64_t k = runs[i].first;
#if defined(STOF_NEON)
    for (; k + 4 <= last; k += 4, value += 4 * ldv) {
      if constexpr (kAhead) Prefetch(ahead + k * kBytes, 4 * kBytes);
      AddFourSteps([&](int r) { return Simd::Load(p + r * ldp + k); },
                   [&](int step, int j) { return LoadFloats(value + step * ldv + j * kWidth); }, sum);
    }
#endif
#pragma GCC unroll 4
    for (; k < last; ++k, value += ldv) {
      V x[kBlock];
#pragma GCC unroll 8
      for (int j = 0; j < kBlock; ++j) x[j] = LoadFloats(value + j * kWidth);
      if constexpr (kAhead) Prefetch(ahead + k * kBytes, kBytes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const V w = Simd::Set1(p[r * ldp + k]);
#pragma GCC unroll 8
        for (int j = 0; j < kBlock; ++j) sum[r][j] = Simd::Fma(w, x[j], sum[r][j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int j = 0; j < kBlock; ++j) {
      float* const to = o + r * ldo + j * kWidth;
      Simd::Store(to, Simd::Add(Simd::Load(to), sum[r][j]));
    }
  }
}

// Panel of kPanel keys: to[d][j] = rows[j][d]; rows beyond count are 0.
inline void PackPanel(const float* rows, int64_t stride, int64_t count, int64_t size, float* to) {
  int64_t d = 0;
#if defined(__AVX2__)
  if (count == kPanel) {
    for (; d + 8 <= size; d += 8) {
      for (int half = 0; half < kPanel; half += 8) {
        const float* from = rows + half * stride + d;
        __m256 a[8], b[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(from + i * stride);
#pragma GCC unroll 4
        for (int i = 0; i < 8; i += 2) {
          b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
          b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < 8; i += 4) {
          a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
          a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
          a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
          a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          _mm256_storeu_ps(to + (d + i) * kPanel + half, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
          _mm256_storeu_ps(to + (d + i + 4) * kPanel + half, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
      }
    }
  }
#elif defined(STOF_NEON)
  if (count == kPanel) {
    for (; d + 4 <= size; d += 4) {
      for (int first = 0; first < kPanel; first += 4) {
        const float* from = rows + first * stride + d;
        const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + stride);
        const float32x4_t c = vld1q_f32(from + 2 * stride), e = vld1q_f32(from + 3 * stride);
        const float32x4x2_t ac = vzipq_f32(a, c), be = vzipq_f32(b, e);
        const float32x4x2_t low = vzipq_f32(ac.val[0], be.val[0]), high = vzipq_f32(ac.val[1], be.val[1]);
        vst1q_f32(to + d * kPanel + first, low.val[0]);
        vst1q_f32(to + (d + 1) * kPanel + first, low.val[1]);
        vst1q_f32(to + (d + 2) * kPanel + first, high.val[0]);
        vst1q_f32(to + (d + 3) * kPanel + first, high.val[1]);
      }
    }
  }
#endif
  for (; d < size; ++d) {
    for (int64_t j = 0; j < kPanel; ++j) to[d * kPanel + j] = j < count ? rows[j * stride + d] : 0.0f;
  }
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_ATTENTION_REGISTER_BLOCK_H_
