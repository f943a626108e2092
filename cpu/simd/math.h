// SPDX-License-Identifier: Apache-2.0
// The functions of docs/reference/chain-format.md on vectors of fp32, to fp32's own accuracy (about 2 units in the last
// place; tests/cpp/chain/test_chain.cc measures it), and faster ones of a smaller range for attention. Polynomials are
// minimax fits of our own.
//
// There are several exponentials, as the function is most of the work of a softmax or an activation, and their numbers
// differ:
//   Exp          all x, also where the result is subnormal: two powers of 2, degree 6
//   ExpDown      x <= 0, for sigmoid, softplus and erfc: one power of 2, degree 6
//   ExpOfScore   -88 to 88, for attention: no reduction in two parts of ln 2, degree 5 (relative error 1.7e-7)
//   Exp2Down     2^x for x <= 0, for the complement of erf
#ifndef STOF_CPU_SIMD_MATH_H_
#define STOF_CPU_SIMD_MATH_H_

#include <cstdint>
#include <cstring>

#include "cpu/simd/convert.h"
#include "cpu/simd/simd.h"

namespace stof {
namespace cpu {
namespace {

typedef int32_t I __attribute__((vector_size(4 * kWidth)));
typedef uint32_t U __attribute__((vector_size(4 * kWidth)));  // for sums that may wrap around

inline V Set(float x) { return Simd::Set1(x); }
inline V Fma(V a, V b, V c) { return Simd::Fma(a, b, c); }
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
// kWidth integers converted to fp32. GCC 13.3 compiles a plain loop wrongly at -O3 with AVX-512.
inline V LoadAsFloats(const int32_t* from) {
  I integers;
  std::memcpy(&integers, from, sizeof integers);
  return __builtin_convertvector(integers, V);
}
inline bool Any(I mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(mask)) != 0;
#elif defined(STOF_NEON)
  return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0;
#else
  int32_t any = 0;
  for (int i = 0; i < kWidth; ++i) any |= mask[i];
  return any != 0;
#endif
}

// NaN stays NaN.
inline V AtLeast(V x, float least) { return Simd::Max(Set(least), x); }
inline V AtMost(V x, float most) { return Simd::Min(Set(most), x); }

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
inline V Rsqrt(V x) { return 1.0f / Simd::Sqrt(x); }

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
  const float inf = __builtin_inff();
  result = x == 0.0f ? Set(-inf) : result;
  result = x == inf ? x : result;
  result = x < 0.0f ? Set(__builtin_nanf("")) : result;
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

inline V SinCos(V x, int quarter) {
  // Beyond kMost the reduction by three parts of pi / 2 loses digits. Without an FMA the first two parts are short, so
  // that their products are exact.
  constexpr float kMost = Simd::kHasFma ? 1e5f : 8192.0f;
  constexpr float kParts[3] = {Simd::kHasFma ? 0x1.921fb6p+0f : 0x1.92p+0f,
                               Simd::kHasFma ? -0x1.777a5cp-25f : 0x1.fb4p-12f,
                               Simd::kHasFma ? -0x1.ee59dap-50f : 0x1.4442d2p-24f};
  if (Any(~(Abs(x) <= kMost))) {
    for (int i = 0; i < kWidth; ++i) {
      const double wide = x[i];
      x[i] = static_cast<float>(quarter == 0 ? __builtin_sin(wide) : __builtin_cos(wide));
    }
    return x;
  }
  const V magic = Set(0x1.8p23f);
  const V shifted = Fma(x, Set(0x1.45f306p-1f), magic);
  const V n = shifted - magic;
  const U q = Words(shifted) - Words(magic) + static_cast<uint32_t>(quarter);
  V r = Fma(n, Set(-kParts[0]), x);
  r = Fma(n, Set(-kParts[1]), r);
  r = Fma(n, Set(-kParts[2]), r);
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
  for (int i = 0; i < kWidth; ++i) x[i] = __builtin_powf(x[i], y[i]);
  return x;
}

inline V RoundF16(V x) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(STOF_NEON)
  return vcvt_f32_f16(vcvt_f16_f32(x));
#else
  for (int i = 0; i < kWidth; ++i) x[i] = HalfToFloat(FloatToHalf(x[i]));
  return x;
#endif
}
inline V RoundBf16(V x) {
  const U bits = Words(x);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
  return x != x ? Float((bits & 0xffff0000) | 0x400000) : Float(rounded);
}

// ---- attention ----
constexpr float kLog2E = 1.44269504088896340736f;

// 2^f - 1 for f in [-0.5, 0.5] by minimax polynomials of 2^f with the constant term held at 1 (Lawson's iteration).
// Degree 5: relative error of 2^f 9.1e-8 in exact arithmetic, 1.7e-7 with its rounding. Degree 6: 2.0e-9.
inline V Exp2Fraction5(V f) {
  V p = Simd::Set1(0x1.5bba13e2fabe0p-10f);
  p = Simd::Fma(p, f, Simd::Set1(0x1.3cea875966c96p-7f));
  p = Simd::Fma(p, f, Simd::Set1(0x1.c6b752df2f86cp-5f));
  p = Simd::Fma(p, f, Simd::Set1(0x1.ebf9bb8a68811p-3f));
  return Simd::Fma(p, f, Simd::Set1(0x1.62e429203728fp-1f));
}
inline V Exp2Fraction6(V f) {
  V p = Simd::Set1(0x1.41fbbc0f05480p-13f);
  p = Simd::Fma(p, f, Simd::Set1(0x1.5f3e5307e27c0p-10f));
  p = Simd::Fma(p, f, Simd::Set1(0x1.3b2d4cf1df05cp-7f));
  p = Simd::Fma(p, f, Simd::Set1(0x1.c6aee88e6a920p-5f));
  p = Simd::Fma(p, f, Simd::Set1(0x1.ebfbdc3c3031bp-3f));
  return Simd::Fma(p, f, Simd::Set1(0x1.62e430af272c9p-1f));
}

// Adding it rounds to an integer and leaves that integer, biased by 127, in the low bits: 1.5 * 2^23 + 127.
constexpr float kRoundToExponent = 12583039.0f;

// The range of ExpOfScore's argument: 88 log2(e) = 126.96. 88 scales by 2^127, the largest power of two of a float.
// -88 scales by 2^-127, whose biased exponent of 0 makes the result 0.
constexpr float kMostExponent = 88.0f, kLeastExponent = -88.0f;

// e^x for x <= kMostExponent. Exactly 0 at and below kLeastExponent, so that a masked key (-inf) adds nothing; NaN
// stays NaN. Scores are not premultiplied by log2(e): beyond 2.3e38 they would become infinite. The factor costs
// nothing here, since two additions become multiply-adds.
inline V ExpOfScore(V x) {
  x = Simd::Max(Simd::Set1(kLeastExponent), x);
  const V log2e = Simd::Set1(kLog2E);
  const V t = Simd::Fma(x, log2e, Simd::Set1(kRoundToExponent));
  const V f = Simd::Fma(x, log2e, Simd::Sub(Simd::Set1(kRoundToExponent), t));
  const V p = Simd::Fma(Exp2Fraction5(f), f, Simd::Set1(1.0f));
  return Simd::Mul(p, Simd::ShiftToExponent(t));
}

// tanh(u) from x = 2 log2(e) u, by way of 2^x - 1, which keeps its relative accuracy near 0.
inline V TanhFromExponent(V x) {
  x = Simd::Min(Simd::Set1(64.0f), Simd::Max(Simd::Set1(-64.0f), x));
  const V t = Simd::Add(x, Simd::Set1(kRoundToExponent));
  const V f = Simd::Sub(x, Simd::Sub(t, Simd::Set1(kRoundToExponent)));
  const V power = Simd::ShiftToExponent(t);
  const V e = Simd::Fma(Simd::Mul(Exp2Fraction6(f), f), power, Simd::Sub(power, Simd::Set1(1.0f)));
  return Simd::Div(e, Simd::Add(e, Simd::Set1(2.0f)));
}

}  // namespace
}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_SIMD_MATH_H_
