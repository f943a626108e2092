// SPDX-License-Identifier: Apache-2.0
// The bit program of a mask: words of 32 keys of one query. A comparison of affine forms is a range of bits. A
// comparison of a number of the query with one of the key reads each number once. `and`, `or` and `not` cost one
// operation for 32 pairs. All else is evaluated pair by pair. The same code on host and device.
#ifndef STOF_CUDA_MASK_PROGRAM_BIT_PROGRAM_H_
#define STOF_CUDA_MASK_PROGRAM_BIT_PROGRAM_H_

#include <cstdint>

#include "cuda/mask/program/number_program.h"

namespace stof {
namespace cuda {

// Makes the bit program from the number program. Only of a proven mask it has more than one step: for others the
// intervals of the whole decide whether it may be evaluated.
void CompileBits(const ExprSizes& sizes, MaskProgram* program);
// Makes a bit program of one step: the whole number program, pair by pair.
void CompilePairs(MaskProgram* program);

// ---- numbers ----
// The affine, in 32 bits where it is small.
template <typename U>
STOF_HOST_DEVICE U AffineAt(const Affine& x, int64_t b, int64_t h, int64_t q, int64_t k) {
  return static_cast<U>(x.constant) + static_cast<U>(x.b) * static_cast<U>(b) +
         static_cast<U>(x.h) * static_cast<U>(h) + static_cast<U>(x.q) * static_cast<U>(q) +
         static_cast<U>(x.k) * static_cast<U>(k);
}

// A number of a vector, which may be anything, beside affine forms within ±2^61 (±2^28 of small ones, as their
// constants): the same side of all of their differences, and sums that fit.
STOF_HOST_DEVICE int64_t Beside(int64_t x) { return Most(-kLargestInteger - 1, Least(x, kLargestInteger + 1)); }
constexpr int32_t kSmall = 1 << 28;
STOF_HOST_DEVICE int32_t BesideSmall(int64_t x) {
  return static_cast<int32_t>(Most(-2 * kSmall - 1, Least(x, 2 * kSmall + 1)));
}
// x modulo m, 0 < m < 2^31, not negative.
STOF_HOST_DEVICE int32_t Rest(int64_t x, int64_t m) {
  const auto d = static_cast<int32_t>(m);
  if ((d & (d - 1)) == 0) return static_cast<int32_t>(x) & (d - 1);
  const auto narrow = static_cast<int32_t>(x);
  if (narrow == x) {
    const int32_t rest = narrow % d;
    return rest < 0 ? rest + d : rest;
  }
  return static_cast<int32_t>(FloorMod<int64_t>(x, m));
}
// ---- classes ----
// The values that a mask may have in a box.
struct MaskCan {
  bool zero = true, one = true;
};

STOF_HOST_DEVICE Interval RestInterval(Interval a, int64_t m) {
  const int64_t length = a.hi - a.lo;
  if (length < m) {
    const int64_t lo = Rest(a.lo, m);
    if (lo + length < m) return {lo, lo + length};
  }
  return {0, m - 1};
}

// Whether a range holds somewhere in the box and whether everywhere.
template <typename V>
STOF_HOST_DEVICE Interval RangeInterval(const BitStep& step, V lo, V hi) {
  const V constant = static_cast<V>(step.constant), limit = static_cast<V>(step.limit);
  const bool all = hi < limit && (!step.bounded || lo >= constant);
  const bool some = lo < limit && (!step.bounded || hi >= constant);
  return step.inverted ? Interval{!some, !all} : Interval{all, some};
}

// side(i) gives the extremes of a side in the box. kIntervals: a step may need MaskIntervals, and then `ok`
// and `narrow` are what those say, else unchanged.
template <bool kIntervals, typename Side>
STOF_HOST_DEVICE MaskCan DecideBits(const MaskView& view, const MaskBox& box, const Side& side, bool* ok,
                                    bool* narrow) {
  uint32_t zeros = 0, ones = 0;  // the stack, its top lowest
  for (int i = 0; i < view.bit_steps_count; ++i) {
    const BitStep& step = view.bit_steps[i];
    const uint32_t zero = zeros & 1, one = ones & 1, zero2 = zeros >> 1 & 1, one2 = ones >> 1 & 1;
    Interval found{0, 1};
    switch (step.kind) {
      case BitStep::kAnd:
        zeros = zeros >> 2 << 1 | zero | zero2, ones = ones >> 2 << 1 | (one & one2);
        continue;
      case BitStep::kOr:
        zeros = zeros >> 2 << 1 | (zero & zero2), ones = ones >> 2 << 1 | one | one2;
        continue;
      case BitStep::kNot:
        zeros = zeros >> 1 << 1 | one, ones = ones >> 1 << 1 | zero;
        continue;
      case BitStep::kRange: {
        const Affine& x = view.affines[step.affine];
        const Interval own = step.sign != 0 ? side(step.row) : Interval{0, 0};
        if (step.small) {
          const bool up = x.q >= 0;
          const auto value = [&](int64_t q, int64_t k) {
            return static_cast<int32_t>(AffineAt<uint32_t>(x, box.b, box.h, q, k));
          };
          int32_t lo = value(up ? box.q_lo : box.q_hi, box.k_lo), hi = value(up ? box.q_hi : box.q_lo, box.k_hi);
          if (step.sign != 0) {
            const int32_t least = BesideSmall(own.lo), most = BesideSmall(own.hi);
            lo += step.sign > 0 ? least : -most, hi += step.sign > 0 ? most : -least;
          }
          found = RangeInterval<int32_t>(step, lo, hi);
        } else {
          Interval v = AffineInterval(x, box);
          if (step.sign != 0) {
            const int64_t least = Beside(own.lo), most = Beside(own.hi);
            v.lo += step.sign > 0 ? least : -most, v.hi += step.sign > 0 ? most : -least;
          }
          found = RangeInterval<int64_t>(step, v.lo, v.hi);
        }
        break;
      }
      case BitStep::kLinear: {
        Interval v = AffineInterval(view.affines[step.affine], box);
        if (step.row >= 0) {
          const Interval own = side(step.row);
          v.lo -= Beside(own.hi), v.hi -= Beside(own.lo);
        }
        found = CompareInterval(step.op, v, {step.constant, step.constant});
        break;
      }
      case BitStep::kAbs:
        found = CompareInterval(step.op, AbsInterval(AffineInterval(view.affines[step.affine], box)),
                                {step.constant, step.constant});
        break;
      case BitStep::kMod:
        found = CompareInterval(step.op, RestInterval(AffineInterval(view.affines[step.affine], box), step.limit),
                                {step.constant, step.constant});
        break;
      case BitStep::kOuter:
        found = CompareInterval(step.op, side(step.row), side(step.key));
        break;
      case BitStep::kKeys:
        found = CompareInterval(ExprOp::kNe, side(step.key), {0, 0});
        break;
      default:  // kBytes, kPairs
        if (kIntervals &&
            (step.kind == BitStep::kPairs || view.operands[view.steps[step.first + 1].operand].blocks >= 0)) {
          MaskView part = view;
          part.steps += step.first, part.count = step.count;
          MaskIntervals intervals(part);
          found = intervals.Run(box);
          *ok = *ok && intervals.ok();
          *narrow = *narrow && intervals.narrow();
        }
    }
    zeros = zeros << 1 | (found.lo == 0 ? 1u : 0u), ones = ones << 1 | (found.hi != 0 ? 1u : 0u);
  }
  return {(zeros & 1) != 0, (ones & 1) != 0};
}

// ---- bits ----
// Bits below t.
STOF_HOST_DEVICE uint32_t BitsBelow(int64_t t) {
  return t <= 0 ? 0u : t >= 32 ? ~0u : (1u << static_cast<int>(t)) - 1u;
}
STOF_HOST_DEVICE uint32_t BitsBelow(int32_t t) {
#if defined(__CUDA_ARCH__)
  return ~__funnelshift_lc(0u, ~0u, static_cast<uint32_t>(max(t, 0)));
#else
  return BitsBelow(int64_t{t});
#endif
}
// Bits j where r + slope * j `op` 0.
STOF_HOST_DEVICE uint32_t LineBits(ExprOp op, int64_t r, int64_t slope) {
  if (slope == 0) return Compare<int64_t>(op, r, 0) ? ~0u : 0u;
  if (slope != 1 && slope != -1) {
    uint32_t bits = 0;
    for (int j = 0; j < 32; ++j) {
      const uint64_t value = static_cast<uint64_t>(r) + static_cast<uint64_t>(slope) * static_cast<uint64_t>(j);
      bits |= (Compare<int64_t>(op, static_cast<int64_t>(value), 0) ? 1u : 0u) << j;
    }
    return bits;
  }
  if (slope < 0) op = MirrorComparison(op);
  const int64_t at = slope < 0 ? r : -r;  // j `op` at
  const uint32_t below = BitsBelow(at), to = BitsBelow(at + 1);
  switch (op) {
    case ExprOp::kLt:
      return below;
    case ExprOp::kLe:
      return to;
    case ExprOp::kGt:
      return ~to;
    case ExprOp::kGe:
      return ~below;
    case ExprOp::kEq:
      return to & ~below;
    default:  // kNe
      return ~(to & ~below);
  }
}
STOF_HOST_DEVICE int64_t Plus(int64_t x, int64_t y) {  // wraps, which only bits that mean nothing do
  return static_cast<int64_t>(static_cast<uint64_t>(x) + static_cast<uint64_t>(y));
}
// Bits j where abs(v + slope * j) `op` c, c >= 0.
STOF_HOST_DEVICE uint32_t AbsBits(ExprOp op, int64_t v, int64_t slope, int64_t c) {
  switch (op) {
    case ExprOp::kLt:
    case ExprOp::kGe: {
      const uint32_t in = LineBits(ExprOp::kLt, Plus(v, -c), slope) & LineBits(ExprOp::kGt, Plus(v, c), slope);
      return op == ExprOp::kLt ? in : ~in;
    }
    case ExprOp::kLe:
    case ExprOp::kGt: {
      const uint32_t in = LineBits(ExprOp::kLe, Plus(v, -c), slope) & LineBits(ExprOp::kGe, Plus(v, c), slope);
      return op == ExprOp::kLe ? in : ~in;
    }
    default: {
      const uint32_t on = LineBits(ExprOp::kEq, Plus(v, -c), slope) | LineBits(ExprOp::kEq, Plus(v, c), slope);
      return op == ExprOp::kEq ? on : ~on;
    }
  }
}
// Bits j where (rest + j) % limit `op` constant; 0 <= rest < limit.
STOF_HOST_DEVICE uint32_t RestBits(const BitStep& step, int32_t rest) {
  if (step.limit <= 32) return static_cast<uint32_t>(step.pattern >> rest);
  const int64_t v = rest - step.constant;
  const uint32_t before = BitsBelow(step.limit - rest);
  return (before & LineBits(step.op, v, 1)) | (~before & LineBits(step.op, v - step.limit, 1));
}

// A query's two words of keys k0 ... k0 + 31 and k0 + 32 ... k0 + 63, of which k0 is one of the problem; bits of keys
// beyond it mean nothing. `lanes` gives what lanes of a warp do together, one query each:
//   Row(side): that side's value of the query;
//   Outer(step, b, h, k0, bits), Keys(...), Bytes(...), Pairs(...): both words of such a step.
// Longer than 80 lines: an interpreter, whose kinds of steps share the stack and its top in registers.
template <typename Lanes>
STOF_HOST_DEVICE void EvaluateBits(const MaskView& view, int64_t b, int64_t h, int64_t q, int64_t k0,
                                   const Lanes& lanes, uint32_t (&top)[2]) {
  uint32_t stack[kMaskStack][2];
  int depth = 0;  // entries below `top`
  for (int i = 0; i < view.bit_steps_count; ++i) {
    const BitStep& step = view.bit_steps[i];
    if (step.kind == BitStep::kNot) {
      top[0] = ~top[0], top[1] = ~top[1];
      continue;
    }
    if (step.kind == BitStep::kAnd || step.kind == BitStep::kOr) {
      --depth;
      const uint32_t x = stack[depth][0], y = stack[depth][1];
      if (step.kind == BitStep::kAnd) {
        top[0] &= x, top[1] &= y;
      } else {
        top[0] |= x, top[1] |= y;
      }
      continue;
    }
    if (i > 0) {
      stack[depth][0] = top[0], stack[depth][1] = top[1];
      ++depth;
    }
    switch (step.kind) {
      case BitStep::kOuter:
        lanes.Outer(step, b, h, k0, top);
        continue;
      case BitStep::kKeys:
        lanes.Keys(step, b, h, k0, top);
        continue;
      case BitStep::kBytes:
        lanes.Bytes(step, b, h, k0, top);
        continue;
      case BitStep::kPairs:
        lanes.Pairs(step, b, h, k0, top);
        continue;
      default:
        break;
    }
    const Affine& x = view.affines[step.affine];
    if (step.kind == BitStep::kRange && step.small) {
      auto v = static_cast<int32_t>(AffineAt<uint32_t>(x, b, h, q, k0));
      if (step.sign != 0) v += step.sign * BesideSmall(lanes.Row(step.row));
      const auto constant = static_cast<int32_t>(step.constant), limit = static_cast<int32_t>(step.limit);
      STOF_UNROLL
      for (int w = 0; w < 2; ++w) {
        const int32_t own = x.k != 0 ? v + 32 * w : v;
        if (x.k != 0) {
          top[w] = BitsBelow(limit - own);
          if (step.bounded) top[w] &= ~BitsBelow(constant - own);
        } else {
          top[w] = own < limit && (!step.bounded || own >= constant) ? ~0u : 0u;
        }
        if (step.inverted) top[w] = ~top[w];
      }
      continue;
    }
    if (step.kind == BitStep::kMod && step.small) {
      const int32_t rest = Rest(static_cast<int32_t>(AffineAt<uint32_t>(x, b, h, q, k0)), step.limit);
      top[0] = RestBits(step, rest);
      top[1] = RestBits(step, Rest(int64_t{rest} + 32, step.limit));
      continue;
    }
    using U = uint64_t;
    const U first = AffineAt<U>(x, b, h, q, k0);
    if (step.kind == BitStep::kRange) {
      const auto v = static_cast<int64_t>(
          first + (step.sign != 0 ? static_cast<U>(step.sign * Beside(lanes.Row(step.row))) : U{0}));
      STOF_UNROLL
      for (int w = 0; w < 2; ++w) {
        const int64_t own = x.k != 0 ? v + 32 * w : v;
        if (x.k != 0) {
          top[w] = BitsBelow(step.limit - own);
          if (step.bounded) top[w] &= ~BitsBelow(step.constant - own);
        } else {
          top[w] = own < step.limit && (!step.bounded || own >= step.constant) ? ~0u : 0u;
        }
        if (step.inverted) top[w] = ~top[w];
      }
      continue;
    }
    if (step.kind == BitStep::kMod) {
      int32_t rest = Rest(static_cast<int64_t>(first), step.limit);
      top[0] = RestBits(step, rest);
      top[1] = RestBits(step, Rest(int64_t{rest} + 32, step.limit));
      continue;
    }
    const U own = step.kind == BitStep::kLinear && step.row >= 0 ? static_cast<U>(Beside(lanes.Row(step.row))) : U{0};
    STOF_UNROLL
    for (int w = 0; w < 2; ++w) {
      const auto v = static_cast<int64_t>(first + static_cast<U>(32 * w) * static_cast<U>(x.k) - own);
      top[w] = step.kind == BitStep::kAbs ? AbsBits(step.op, v, x.k, step.constant)
                                          : LineBits(step.op, Plus(v, -step.constant), x.k);
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_PROGRAM_BIT_PROGRAM_H_
