// SPDX-License-Identifier: Apache-2.0
// Loops over strips, one function for each operator and set of single-valued arguments.
#include "cpu/chain/chain.h"
#include "cpu/kernel_table.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/math.h"

namespace stof {
namespace cpu {
namespace {

template <int kArity, int kSingle, typename F>
inline void Map(float* dst, const float* a, const float* b, const float* c, int64_t n, const ChainRows& rows, F f) {
  V va = {}, vb = {}, vc = {};
  if ((kSingle & 1) != 0) va = Set(*a);
  if (kArity > 1 && (kSingle & 2) != 0) vb = Set(*b);
  if (kArity > 2 && (kSingle & 4) != 0) vc = Set(*c);
  for (int64_t row = 0;;) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      if ((kSingle & 1) == 0) va = Simd::Load(a + i);
      if (kArity > 1 && (kSingle & 2) == 0) vb = Simd::Load(b + i);
      if (kArity > 2 && (kSingle & 4) == 0) vc = Simd::Load(c + i);
      Simd::Store(dst + i, f(va, vb, vc));
    }
    if (i < n) {
      const int rest = static_cast<int>(n - i);
      if ((kSingle & 1) == 0) va = Simd::LoadSome(a + i, rest);
      if (kArity > 1 && (kSingle & 2) == 0) vb = Simd::LoadSome(b + i, rest);
      if (kArity > 2 && (kSingle & 4) == 0) vc = Simd::LoadSome(c + i, rest);
      Simd::StoreSome(dst + i, f(va, vb, vc), rest);
    }
    if (++row >= rows.count) return;
    dst += rows.dst;
    if ((kSingle & 1) == 0) a += rows.a;
    if (kArity > 1 && (kSingle & 2) == 0) b += rows.b;
    if (kArity > 2 && (kSingle & 4) == 0) c += rows.c;
  }
}

#define STOF_CHAIN_OP(name, arity, expression)                                                                     \
  template <int kSingle>                                                                                           \
  void name##Strip(float* dst, const float* a, const float* b, const float* c, int64_t n, const ChainRows& rows) { \
    Map<arity, kSingle>(dst, a, b, c, n, rows, [](V x, V y, V z) -> V {                                            \
      (void)y, (void)z;                                                                                            \
      return expression;                                                                                           \
    });                                                                                                            \
  }
#define STOF_CHAIN_TRUTH(condition) ((condition) ? Set(1.0f) : V{})
STOF_CHAIN_OP(Neg, 1, -x)
STOF_CHAIN_OP(Abs, 1, Abs(x))
STOF_CHAIN_OP(Exp, 1, Exp(x))
STOF_CHAIN_OP(Log, 1, Log(x))
STOF_CHAIN_OP(Sqrt, 1, Simd::Sqrt(x))
STOF_CHAIN_OP(Rsqrt, 1, Rsqrt(x))
STOF_CHAIN_OP(Reciprocal, 1, 1.0f / x)
STOF_CHAIN_OP(Tanh, 1, Tanh(x))
STOF_CHAIN_OP(Erf, 1, Erf(x))
STOF_CHAIN_OP(Sigmoid, 1, Sigmoid(x))
STOF_CHAIN_OP(Softplus, 1, Softplus(x))
STOF_CHAIN_OP(Sin, 1, Sin(x))
STOF_CHAIN_OP(Cos, 1, Cos(x))
STOF_CHAIN_OP(Floor, 1, Simd::Floor(x))
STOF_CHAIN_OP(Ceil, 1, Simd::Ceil(x))
STOF_CHAIN_OP(Round, 1, Simd::Round(x))
STOF_CHAIN_OP(Relu, 1, Relu(x))
STOF_CHAIN_OP(Silu, 1, Silu(x))
STOF_CHAIN_OP(Gelu, 1, Gelu(x))
STOF_CHAIN_OP(GeluTanh, 1, GeluTanh(x))
STOF_CHAIN_OP(RoundF16, 1, RoundF16(x))
STOF_CHAIN_OP(RoundBf16, 1, RoundBf16(x))
STOF_CHAIN_OP(Copy, 1, x)
STOF_CHAIN_OP(Add, 2, x + y)
STOF_CHAIN_OP(Sub, 2, x - y)
STOF_CHAIN_OP(Mul, 2, x* y)
STOF_CHAIN_OP(Div, 2, x / y)
STOF_CHAIN_OP(Min, 2, Min(x, y))
STOF_CHAIN_OP(Max, 2, Max(x, y))
STOF_CHAIN_OP(Pow, 2, Pow(x, y))
STOF_CHAIN_OP(Lt, 2, STOF_CHAIN_TRUTH(x < y))
STOF_CHAIN_OP(Le, 2, STOF_CHAIN_TRUTH(x <= y))
STOF_CHAIN_OP(Gt, 2, STOF_CHAIN_TRUTH(x > y))
STOF_CHAIN_OP(Ge, 2, STOF_CHAIN_TRUTH(x >= y))
STOF_CHAIN_OP(Eq, 2, STOF_CHAIN_TRUTH(x == y))
STOF_CHAIN_OP(Ne, 2, STOF_CHAIN_TRUTH(x != y))
STOF_CHAIN_OP(Select, 3, x != 0.0f ? y : z)
STOF_CHAIN_OP(MulAdd, 3, Fma(x, y, z))
STOF_CHAIN_OP(MulSub, 3, Fma(x, y, -z))
STOF_CHAIN_OP(SubMul, 3, Fma(-x, y, z))

// Sums go to fp64 after three additions in fp32 (eight vectors as a tree), so that their error is that of the terms
// and of these, however long the row is.
typedef double D __attribute__((vector_size(4 * kWidth)));
typedef float H __attribute__((vector_size(2 * kWidth)));
struct Total {
  D low = {}, high = {};
  void Add(V v) {
#if defined(__AVX512F__)
    low += _mm512_cvtps_pd(_mm512_castps512_ps256(v));
    high += _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(__AVX2__)
    low += _mm256_cvtps_pd(_mm256_castps256_ps128(v));
    high += _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#elif defined(STOF_NEON)
    low += vcvt_f64_f32(vget_low_f32(v));
    high += vcvt_high_f64_f32(v);
#else
    H half[2];
    std::memcpy(half, &v, sizeof v);
    low += __builtin_convertvector(half[0], D);
    high += __builtin_convertvector(half[1], D);
#endif
  }
  double Value() const {
    const D both = low + high;
    double total = 0.0;
    for (int i = 0; i < kWidth / 2; ++i) total += both[i];
    return total;
  }
};
template <typename F>
inline double SumOf(int64_t n, F term) {
  Total total;
  int64_t i = 0;
  for (; i + 8 * kWidth <= n; i += 8 * kWidth) {
    V v[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) v[k] = term(i + k * kWidth, kWidth);
    total.Add(((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])));
  }
  for (; i + kWidth <= n; i += kWidth) total.Add(term(i, kWidth));
  if (i < n) total.Add(term(i, static_cast<int>(n - i)));
  return total.Value();
}
inline V LoadUpTo(const float* p, int count) { return count == kWidth ? Simd::Load(p) : Simd::LoadSome(p, count); }
inline double SumStrip(const float* a, int64_t n) {
  return SumOf(n, [a](int64_t i, int count) { return LoadUpTo(a + i, count); });
}
inline double DotStrip(const float* a, const float* b, int64_t n) {
  return SumOf(n, [a, b](int64_t i, int count) { return LoadUpTo(a + i, count) * LoadUpTo(b + i, count); });
}

template <bool kMax>
inline V Better(V a, V b) {  // a where either is NaN
  return kMax ? Simd::Max(b, a) : Simd::Min(b, a);
}
template <bool kMax>
inline float ExtremeStrip(const float* a, int64_t n) {
  const float least = kMax ? -__builtin_inff() : __builtin_inff();
  V best[4] = {Set(least), Set(least), Set(least), Set(least)};
  I nan = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const V v = Simd::Load(a + i + k * kWidth);
      nan |= v != v;
      best[k] = Better<kMax>(best[k], v);
    }
  }
  for (; i + kWidth <= n; i += kWidth) {
    const V v = Simd::Load(a + i);
    nan |= v != v;
    best[0] = Better<kMax>(best[0], v);
  }
  if (i < n) {
    // What lies beyond is the least of all: it cannot win.
    V v = Set(least);
    std::memcpy(&v, a + i, static_cast<size_t>(n - i) * 4);
    nan |= v != v;
    best[0] = Better<kMax>(best[0], v);
  }
  if (Any(nan)) return __builtin_nanf("");
  float lanes[kWidth];
  Simd::Store(lanes, Better<kMax>(Better<kMax>(best[0], best[1]), Better<kMax>(best[2], best[3])));
  for (int width = kWidth / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) {
      const float x = lanes[k], y = lanes[k + width];
      lanes[k] = (kMax ? y > x : y < x) ? y : x;
    }
  }
  return lanes[0];
}

inline void StoreStrip(const float* from, DType dtype, int64_t n, void* target) {
  if (dtype != DType::kBF16) return FromFloats(from, dtype, n, target);
  typedef uint16_t S __attribute__((vector_size(2 * kWidth)));
  auto* to = static_cast<uint16_t*>(target);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const V rounded = RoundBf16(Simd::Load(from + i));
    const S halves = __builtin_convertvector(Words(rounded) >> 16, S);
    std::memcpy(to + i, &halves, sizeof halves);
  }
  for (; i < n; ++i) to[i] = FloatToBfloat16(from[i]);
}

#define STOF_CHAIN_ONE(name) {name##Strip<0>, name##Strip<1>}
#define STOF_CHAIN_TWO(name) {name##Strip<0>, name##Strip<1>, name##Strip<2>, name##Strip<3>}
#define STOF_CHAIN_THREE(name)                                     \
  {name##Strip<0>, name##Strip<1>, name##Strip<2>, name##Strip<3>, \
   name##Strip<4>, name##Strip<5>, name##Strip<6>, name##Strip<7>}
}  // namespace

// In the order of ChainOp and FusedOp.
STOF_EXPORT_KERNELS(ChainKernels, chain) = {{{},
                                             {},
                                             {},
                                             STOF_CHAIN_ONE(Neg),
                                             STOF_CHAIN_ONE(Abs),
                                             STOF_CHAIN_ONE(Exp),
                                             STOF_CHAIN_ONE(Log),
                                             STOF_CHAIN_ONE(Sqrt),
                                             STOF_CHAIN_ONE(Rsqrt),
                                             STOF_CHAIN_ONE(Reciprocal),
                                             STOF_CHAIN_ONE(Tanh),
                                             STOF_CHAIN_ONE(Erf),
                                             STOF_CHAIN_ONE(Sigmoid),
                                             STOF_CHAIN_ONE(Softplus),
                                             STOF_CHAIN_ONE(Sin),
                                             STOF_CHAIN_ONE(Cos),
                                             STOF_CHAIN_ONE(Floor),
                                             STOF_CHAIN_ONE(Ceil),
                                             STOF_CHAIN_ONE(Round),
                                             STOF_CHAIN_ONE(Relu),
                                             STOF_CHAIN_ONE(Silu),
                                             STOF_CHAIN_ONE(Gelu),
                                             STOF_CHAIN_ONE(GeluTanh),
                                             STOF_CHAIN_ONE(RoundF16),
                                             STOF_CHAIN_ONE(RoundBf16),
                                             STOF_CHAIN_TWO(Add),
                                             STOF_CHAIN_TWO(Sub),
                                             STOF_CHAIN_TWO(Mul),
                                             STOF_CHAIN_TWO(Div),
                                             STOF_CHAIN_TWO(Min),
                                             STOF_CHAIN_TWO(Max),
                                             STOF_CHAIN_TWO(Pow),
                                             STOF_CHAIN_TWO(Lt),
                                             STOF_CHAIN_TWO(Le),
                                             STOF_CHAIN_TWO(Gt),
                                             STOF_CHAIN_TWO(Ge),
                                             STOF_CHAIN_TWO(Eq),
                                             STOF_CHAIN_TWO(Ne),
                                             STOF_CHAIN_THREE(Select),
                                             {},
                                             {},
                                             {},
                                             {},
                                             STOF_CHAIN_THREE(MulAdd),
                                             STOF_CHAIN_THREE(MulSub),
                                             STOF_CHAIN_THREE(SubMul),
                                             STOF_CHAIN_ONE(Copy)},
                                            SumStrip,
                                            DotStrip,
                                            ExtremeStrip<true>,
                                            ExtremeStrip<false>,
                                            ToFloats,
                                            StoreStrip};

}  // namespace cpu
}  // namespace stof
