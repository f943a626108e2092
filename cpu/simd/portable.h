// SPDX-License-Identifier: Apache-2.0
// Vectors by the compiler's own vector extension: the fall-back for every machine. Tests also compile it 16 lanes wide,
// which runs the register blocking of AVX-512 on machines without it.
#ifndef STOF_CPU_SIMD_PORTABLE_H_
#define STOF_CPU_SIMD_PORTABLE_H_

#include <cstdint>
#include <cstring>

#ifndef STOF_PORTABLE_WIDTH
#define STOF_PORTABLE_WIDTH 4
#endif

namespace stof {
namespace cpu {
namespace STOF_ISA {

struct Simd {
  static constexpr int kWidth = STOF_PORTABLE_WIDTH;
  static constexpr int kVectors = kWidth >= 16 ? 4 : 2;  // per row of a register block
  typedef float V __attribute__((vector_size(4 * STOF_PORTABLE_WIDTH)));
  typedef int32_t I __attribute__((vector_size(4 * STOF_PORTABLE_WIDTH)));
  using M = I;

  static V Load(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  static void Store(float* p, V v) { std::memcpy(p, &v, sizeof(v)); }
  static V Set1(float x) { return V{} + x; }
  static V Add(V a, V b) { return a + b; }
  static V Sub(V a, V b) { return a - b; }
  static V Mul(V a, V b) { return a * b; }
  static V Div(V a, V b) { return a / b; }
  static V Fma(V a, V b, V c) { return a * b + c; }
  static V Max(V a, V b) { return a > b ? a : b; }  // b where either is NaN
  static V Min(V a, V b) { return a < b ? a : b; }  // likewise
  static M Greater(V a, V b) { return a > b; }
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

}  // namespace STOF_ISA
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_PORTABLE_H_
