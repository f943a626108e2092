// SPDX-License-Identifier: Apache-2.0
// Vectors of fp32 for chains and the functions of docs/reference/chain-format.md on them, to fp32's own accuracy (about
// 2 units in the last place; tests/cpp/chain/test_chain.cc measures it). Included once per instruction set. Polynomials
// are minimax fits of our own.
#ifndef STOF_CPU_CHAIN_FUNCTIONS_H_
#define STOF_CPU_CHAIN_FUNCTIONS_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "cpu/simd/convert.h"

namespace stof {
namespace cpu {
namespace STOF_ISA::chain {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float V __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));  // for sums that may wrap around

inline V Set(float x) { return x - V{}; }  // not V{} + x, which is 0 for -0
inline V Load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void Store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline I Bits(V v) {
  I i;
  std::memcpy(&i, &v, sizeof i);
  return i;
}
inline U Words(V v) {
  U u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
inline V Float(U i) {
  V v;
  std::memcpy(&v, &i, sizeof v);
  return v;
}
inline V Float(I i) {
  V v;
  std::memcpy(&v, &i, sizeof v);
  return v;
}

// The first `count` values, zeros beyond; 1 <= count <= kLanes.
inline V LoadSome(const float* p, int count) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane));
#else
  V v = {};
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return v;
#endif
}
inline void StoreSome(float* p, V v, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), v);
#elif defined(__AVX2__)
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  _mm256_maskstore_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lane), v);
#else
  for (int i = 0; i < count; ++i) p[i] = v[i];
#endif
}

// a * b + c, rounded once where the instruction set can.
inline V Fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline V Sqrt(V v) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(v);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::sqrt(v[i]);
  return v;
#endif
}
inline V Floor(V v) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::floor(v[i]);
  return v;
#endif
}
inline V Ceil(V v) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::ceil(v[i]);
  return v;
#endif
}
inline V Round(V v) {  // halves to even
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = std::nearbyint(v[i]);
  return v;
#endif
}
inline bool Any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
#endif
}

// NaN stays NaN: the instructions give their second argument then.
inline V AtLeast(V x, float least) {
#if defined(__AVX512F__)
  return _mm512_max_ps(Set(least), x);
#elif defined(__AVX2__)
  return _mm256_max_ps(Set(least), x);
#else
  return x < least ? Set(least) : x;
#endif
}
inline V AtMost(V x, float most) {
#if defined(__AVX512F__)
  return _mm512_min_ps(Set(most), x);
#elif defined(__AVX2__)
  return _mm256_min_ps(Set(most), x);
#else
  return x > most ? Set(most) : x;
#endif
}

inline V Abs(V x) { return Float(Bits(x) & 0x7fffffff); }
inline V WithSign(V magnitude, V sign) {
  return Float(Bits(magnitude) | (Bits(sign) & static_cast<int32_t>(0x80000000)));
}
// NaN where one of them is.
inline V Max(V a, V b) {
  const V larger = a > b ? a : b;
  return a != a ? a : larger;
}
inline V Min(V a, V b) {
  const V smaller = a < b ? a : b;
  return a != a ? a : smaller;
}
inline V Relu(V x) { return x < 0.0f ? V{} : x; }
inline V Rsqrt(V x) { return 1.0f / Sqrt(x); }

// x = n ln 2 + r with n whole and |r| <= ln 2 / 2; *i holds n. Exact products: n has 8 bits, the first part of ln 2
// has 16.
inline V ReduceByLn2(V x, I* i) {
  const V magic = Set(0x1.8p23f);
  const V shifted = Fma(x, Set(0x1.715476p+0f), magic);
  const V n = shifted - magic;
  *i = reinterpret_cast<I>(Words(shifted) - Words(magic));
  return Fma(n, Set(-1.42860682e-6f), Fma(n, Set(-0x1.62e4p-1f), x));
}
// exp(r) - 1 for such an r.
inline V ExpReducedMinus1(V r) {
  V q = Fma(Set(0x1.6dc4cap-10f), r, Set(0x1.124758p-7f));
  q = Fma(q, r, Set(0x1.55544ap-5f));
  q = Fma(q, r, Set(0x1.55547ep-3f));
  q = Fma(q, r, Set(0x1p-1f));
  return Fma(q * r, r, r);
}
inline V PowerOf2(I n) { return Float((reinterpret_cast<U>(n) + 127) << 23); }  // -126 to 127

inline V Exp(V x) {
  I n;
  const V r = ReduceByLn2(AtMost(AtLeast(x, -104.0f), 89.0f), &n);
  const V p = ExpReducedMinus1(r) + 1.0f;
  // In two steps: the power itself may be beyond fp32 where the result is not.
  const I half = n >> 1;
  return p * PowerOf2(half) * PowerOf2(n - half);
}

// exp(x) for x <= 0, and 0 below 2^-126.5.
inline V ExpDown(V x) {
  I n;
  const V r = ReduceByLn2(AtLeast(x, -88.0f), &n);  // n >= -127, whose power is 0 here
  return (ExpReducedMinus1(r) + 1.0f) * PowerOf2(n);
}

inline V Log(V x) {
  const I small = x < 0x1p-126f;
  const V scaled = small ? x * 0x1p24f : x;
  const I shifted = reinterpret_cast<I>(Words(scaled) - 0x3f3504f3);  // so that the mantissa lies around 1
  const V e = __builtin_convertvector((shifted >> 23) + (small & -24), V);
  const V f = Float((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f;
  const V s = f / (f + 2.0f);
  const V z = s * s;
  V l = Fma(Set(0x1.e38be2p-4f), z, Set(0x1.24351ap-3f));
  l = Fma(l, z, Set(0x1.999a88p-3f));
  l = Fma(l, z, Set(0x1.555554p-2f));
  const V half = 0.5f * f * f;
  const V rest = Fma(s, half + 2.0f * z * l, e * 1.42860682e-6f);
  V result = Fma(e, Set(0x1.62e4p-1f), f - (half - rest));
  const float inf = std::numeric_limits<float>::infinity();
  result = x == 0.0f ? Set(-inf) : result;
  result = x == inf ? x : result;
  result = x < 0.0f ? Set(std::numeric_limits<float>::quiet_NaN()) : result;
  return x != x ? x : result;
}

inline V Softplus(V x) {  // max(x, 0) + log(1 + exp(-|x|))
  const V u = ExpDown(-Abs(x));
  const V s = u / (u + 2.0f);
  const V z = s * s;
  V l = Fma(Set(0x1.be78a2p-4f), z, Set(0x1.5f238ep-4f));
  l = Fma(l, z, Set(0x1.c8bd7cp-4f));
  l = Fma(l, z, Set(0x1.248a4ep-3f));
  l = Fma(l, z, Set(0x1.9999bep-3f));
  l = Fma(l, z, Set(0x1.555556p-2f));
  return Relu(x) + 2.0f * Fma(s * z, l, s);
}

inline V Tanh(V x) {
  const V t = Abs(x + x);
  I n;
  const V r = ReduceByLn2(AtMost(t, 20.0f), &n);  // 1 in fp32 beyond
  const V power = PowerOf2(n);
  const V e = Fma(power, ExpReducedMinus1(r), power - 1.0f);  // exp(2 |x|) - 1
  return WithSign(e / (e + 2.0f), x);
}

inline V Sigmoid(V x) {
  const V e = ExpDown(-Abs(x));
  return (x < 0.0f ? e : Set(1.0f)) / (e + 1.0f);
}
// -inf gives NaN in these and in Gelu, as by their definitions: -inf * 0.
inline V Silu(V x) { return x * Sigmoid(x); }
inline V GeluTanh(V x) {  // 1 + tanh(u) = 2 sigmoid(2 u); 2 sqrt(2 / pi) = 1.59...
  return x * Sigmoid(1.5957691216f * x * Fma(x * x, Set(0.044715f), Set(1.0f)));
}

// erf(x) - x for |x| <= 1, over x, from z = x * x.
inline V ErfSmall(V z) {
  V p = Fma(Set(0x1.4ae4b8p-14f), z, Set(-0x1.a485e4p-11f));
  p = Fma(p, z, Set(0x1.5419f4p-8f));
  p = Fma(p, z, Set(-0x1.b7fbb4p-6f));
  p = Fma(p, z, Set(0x1.ce2d2p-4f));
  p = Fma(p, z, Set(-0x1.81273ep-2f));
  return Fma(p, z, Set(0x1.06eba8p-3f));
}
// 1 - erf(t) for t >= 1: its logarithm is close to a polynomial.
inline V ErfcLarge(V x) {
  V q = Fma(Set(-0x1.6bd7e2p-16f), x, Set(0x1.cec6p-12f));
  q = Fma(q, x, Set(-0x1.138cbcp-8f));
  q = Fma(q, x, Set(0x1.9d0304p-6f));
  q = Fma(q, x, Set(-0x1.bc1516p-4f));
  q = Fma(q, x, Set(-0x1.443566p-1f));
  q = Fma(q, x, Set(-0x1.212c0cp+0f));
  return ExpDown(Fma(q, x, Set(0x1.8a573cp-13f)));
}
inline V Erf(V x) {
  const V t = Abs(x);
  const V small = Fma(ErfSmall(x * x), x, x);
  return t < 1.0f ? small : WithSign(1.0f - ErfcLarge(t), x);
}
// 2^x for x <= 0, and 0 at and below -127.
inline V Exp2Down(V x) {
  x = AtLeast(x, -127.0f);
  const V magic = Set(0x1.8p23f);
  const V shifted = x + magic;
  const V f = x - (shifted - magic);
  V p = Fma(Set(0x1.41fbbcp-13f), f, Set(0x1.5f3e54p-10f));
  p = Fma(p, f, Set(0x1.3b2d4cp-7f));
  p = Fma(p, f, Set(0x1.c6aee8p-5f));
  p = Fma(p, f, Set(0x1.ebfbdcp-3f));
  p = Fma(p, f, Set(0x1.62e43p-1f));
  return Fma(p, f, Set(1.0f)) * PowerOf2(reinterpret_cast<I>(Words(shifted) - Words(magic)));
}
// erfc(t / sqrt(2)) for t >= 0, by a polynomial for its logarithm: off by 2^-23.5 at most, so that beyond 5 hardly a
// digit is right; it goes on falling, to 0 at 10.
inline V ErfcOverRoot2(V t) {
  V p = Fma(Set(-0x1.7c7edcp-19f), t, Set(0x1.4a52f4p-15f));
  p = Fma(p, t, Set(-0x1.8672c2p-13f));
  p = Fma(p, t, Set(-0x1.1f2d24p-13f));
  p = Fma(p, t, Set(0x1.cee886p-8f));
  p = Fma(p, t, Set(-0x1.ae0c78p-5f));
  p = Fma(p, t, Set(-0x1.d63aacp-2f));
  p = Fma(p, t, Set(-0x1.26aed4p+0f));
  return Exp2Down(p * t);
}
inline V Gelu(V x) {  // max(x, 0) - |x| / 2 erfc(|x| / sqrt(2))
  const V t = Abs(x);
  const V half = -0.5f * AtMost(t, 1e30f);  // inf stays: nothing is taken from it
  return Fma(half, ErfcOverRoot2(t), x * (x < 0.0f ? V{} : Set(1.0f)));
}

inline V SinCos(V x, int quarter) {
#if defined(__AVX2__)
  constexpr float kMost = 1e5f;  // beyond it the reduction by three parts of pi / 2 loses digits
  const float parts[3] = {0x1.921fb6p+0f, -0x1.777a5cp-25f, -0x1.ee59dap-50f};
#else
  constexpr float kMost = 8192.0f;
  const float parts[3] = {0x1.92p+0f, 0x1.fb4p-12f, 0x1.4442d2p-24f};
#endif
  if (Any(~(Abs(x) <= kMost))) {
    for (int i = 0; i < kLanes; ++i) {
      const double wide = x[i];
      x[i] = static_cast<float>(quarter == 0 ? std::sin(wide) : std::cos(wide));
    }
    return x;
  }
  const V magic = Set(0x1.8p23f);
  const V shifted = Fma(x, Set(0x1.45f306p-1f), magic);
  const V n = shifted - magic;
  const U q = Words(shifted) - Words(magic) + static_cast<uint32_t>(quarter);
  V r = Fma(n, Set(-parts[0]), x);
  r = Fma(n, Set(-parts[1]), r);
  r = Fma(n, Set(-parts[2]), r);
  const V z = r * r;
  V s = Fma(Set(0x1.6ca4e2p-19f), z, Set(-0x1.a00ec4p-13f));
  s = Fma(s, z, Set(0x1.111108p-7f));
  s = Fma(s, z, Set(-0x1.555556p-3f));
  s = Fma(s * z, r, r);
  V c = Fma(Set(0x1.99c3ccp-16f), z, Set(-0x1.6c0bb6p-10f));
  c = Fma(c, z, Set(0x1.55554ap-5f));
  c = Fma(c * z, z, 1.0f - 0.5f * z);
  const V result = (q & 1) != 0 ? c : s;
  return Float(Words(result) ^ ((q & 2) << 30));
}
inline V Sin(V x) { return x == 0.0f ? x : SinCos(x, 0); }
inline V Cos(V x) { return SinCos(x, 1); }

inline V Pow(V x, V y) {
  for (int i = 0; i < kLanes; ++i) x[i] = std::pow(x[i], y[i]);
  return x;
}

inline V RoundF16(V x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = HalfToFloat(FloatToHalf(x[i]));
  return x;
#endif
}
inline V RoundBf16(V x) {
  const U bits = Words(x);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return x != x ? Float((bits & 0xffff0000) | 0x400000) : Float(rounded);
}

}  // namespace STOF_ISA::chain
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_CHAIN_FUNCTIONS_H_
