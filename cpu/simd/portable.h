// SPDX-License-Identifier: Apache-2.0
// Vectors by the compiler's own vector extension: the fall-back for every machine. Tests also compile it 16 lanes wide
// (STOF_PORTABLE_WIDTH in tests/cpp/CMakeLists.txt), which runs the register blocking of AVX-512 on machines without
// it.
#ifndef STOF_CPU_SIMD_PORTABLE_H_
#define STOF_CPU_SIMD_PORTABLE_H_

#include <cstdint>
#include <cstring>

#ifndef STOF_PORTABLE_WIDTH
#define STOF_PORTABLE_WIDTH 4
#endif

namespace stof {
namespace cpu {
namespace {

struct Simd {
  static constexpr int kWidth = STOF_PORTABLE_WIDTH;
  static constexpr bool kHasFma = false;
  // Accumulators of tiles, as in avx2.h and, 16 lanes wide, in avx512.h.
  static constexpr bool kIsWide = kWidth >= 16;
  static constexpr int kVectors = kIsWide ? 4 : 2;
  static constexpr int kKeysOfFourRows = 2;
  static constexpr int kTileRows = kIsWide ? 8 : 6, kTileVectors = kIsWide ? 3 : 2;
  static constexpr int kDotTokens = kIsWide ? 6 : 2, kDotPanels = kIsWide ? 4 : 1;
  static constexpr int kPairVectors = kIsWide ? 8 : 2, kDownTokens = kIsWide ? 8 : 2;
  static constexpr int kPanelRows = kIsWide ? 6 : 2;  // of a tile of panels, see RowsOfTile
  typedef float V __attribute__((vector_size(4 * STOF_PORTABLE_WIDTH)));
  typedef int32_t I __attribute__((vector_size(4 * STOF_PORTABLE_WIDTH)));
  using M = I;

  static V Load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(float* p, V v) { std::memcpy(p, &v, sizeof(v)); }
  // The first `count` values, zeros beyond; 1 <= count <= kWidth.
  static V LoadSome(const float* p, int count) {
    V v = {};
    for (int i = 0; i < count; ++i) v[i] = p[i];
    return v;
  }
  static void StoreSome(float* p, V v, int count) {
    for (int i = 0; i < count; ++i) p[i] = v[i];
  }
  static V Set1(float x) { return x - V{}; }  // not V{} + x, which is 0 for -0
  static V Add(V a, V b) { return a + b; }
  static V Sub(V a, V b) { return a - b; }
  static V Mul(V a, V b) { return a * b; }
  static V Div(V a, V b) { return a / b; }
  // Rounded twice: -ffp-contract=off holds for all sets.
  static V Fma(V a, V b, V c) { return a * b + c; }
  static float Fma(float a, float b, float c) { return a * b + c; }
  static V Fms(V a, V b, V c) { return a * b - c; }
  static float Fms(float a, float b, float c) { return a * b - c; }
  static V Sqrt(V v) {
    for (int i = 0; i < kWidth; ++i) v[i] = __builtin_sqrtf(v[i]);
    return v;
  }
  static V Floor(V v) {
    for (int i = 0; i < kWidth; ++i) v[i] = __builtin_floorf(v[i]);
    return v;
  }
  static V Ceil(V v) {
    for (int i = 0; i < kWidth; ++i) v[i] = __builtin_ceilf(v[i]);
    return v;
  }
  static V Round(V v) {  // halves to even
    for (int i = 0; i < kWidth; ++i) v[i] = __builtin_nearbyintf(v[i]);
    return v;
  }
  static V Max(V a, V b) { return a > b ? a : b; }  // b where either is NaN
  static V Min(V a, V b) { return a < b ? a : b; }  // likewise
  static M Greater(V a, V b) { return a > b; }
  static M GreaterEqual(V a, V b) { return a >= b; }
  static M Or(M a, M b) { return a | b; }
  static bool Any(M m) {
    int32_t any = 0;
    for (int i = 0; i < kWidth; ++i) any |= m[i];
    return any != 0;
  }
  // Lane i: bit i of bits ? a : b.
  static V Where(uint32_t bits, V a, V b) {
    I lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = 1 << i;
    return ((I{} + static_cast<int32_t>(bits)) & lane) != 0 ? a : b;
  }
  static V WhereEqual(V x, V y, V a, V b) { return x == y ? a : b; }
  // Lane i: from[at[i] - base], which is below kWidth.
  static V Pick(const float* from, const int32_t* at, int32_t base) {
    V v;
    for (int i = 0; i < kWidth; ++i) v[i] = from[at[i] - base];
    return v;
  }
  // The float whose bits are those of v shifted into the exponent.
  static V ShiftToExponent(V v) {
    I i;
    std::memcpy(&i, &v, sizeof(i));
    i = i << 23;
    V result;
    std::memcpy(&result, &i, sizeof(i));
    return result;
  }
  static float ReduceAdd(V v) {
    float sum[kWidth];
    Store(sum, v);
    for (int w = kWidth / 2; w > 0; w /= 2) {
      for (int i = 0; i < w; ++i) sum[i] += sum[i + w];
    }
    return sum[0];
  }
  static float ReduceMax(V v) {
    float x = v[0];
    for (int i = 1; i < kWidth; ++i) x = v[i] > x ? v[i] : x;
    return x;
  }
};

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_PORTABLE_H_
