// SPDX-License-Identifier: Apache-2.0
// Masks as words: 32 keys of one query at a time. A comparison of affine forms is a range of bits. A comparison of a
// number of the query with one of the key reads each number once. `and`, `or` and `not` cost one operation for 32
// pairs. All else is evaluated pair by pair. The same code on host and device.
#ifndef STOF_CUDA_MASK_PROGRAM_MASK_WORDS_H_
#define STOF_CUDA_MASK_PROGRAM_MASK_WORDS_H_

#include <cstdint>

#include "cuda/mask/program/mask_program.h"

namespace stof {
namespace cuda {

// Writes the words of a program from its steps. Only a proven program has more than one word: for others the intervals
// of the whole decide whether it may be evaluated.
void MakeWords(const ExprSizes& sizes, MaskProgram* program);
// The whole program as one word.
void MakeOneWord(MaskProgram* program);

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
STOF_HOST_DEVICE Interval RangeInterval(const MaskWord& word, V lo, V hi) {
  const V constant = static_cast<V>(word.constant), limit = static_cast<V>(word.limit);
  const bool all = hi < limit && (!word.bounded || lo >= constant);
  const bool some = lo < limit && (!word.bounded || hi >= constant);
  return word.inverted ? Interval{!some, !all} : Interval{all, some};
}

// side(i) gives the extremes of a side in the box. kIntervals: a word may need MaskIntervals, and then `ok`
// and `narrow` are what those say, else unchanged.
template <bool kIntervals, typename Side>
STOF_HOST_DEVICE MaskCan DecideWords(const MaskView& view, const MaskBox& box, const Side& side, bool* ok,
                                     bool* narrow) {
  uint32_t zeros = 0, ones = 0;  // the stack, its top lowest
  for (int i = 0; i < view.words_count; ++i) {
    const MaskWord& word = view.words[i];
    const uint32_t zero = zeros & 1, one = ones & 1, zero2 = zeros >> 1 & 1, one2 = ones >> 1 & 1;
    Interval found{0, 1};
    switch (word.kind) {
      case MaskWord::kAnd:
        zeros = zeros >> 2 << 1 | zero | zero2, ones = ones >> 2 << 1 | (one & one2);
        continue;
      case MaskWord::kOr:
        zeros = zeros >> 2 << 1 | (zero & zero2), ones = ones >> 2 << 1 | one | one2;
        continue;
      case MaskWord::kNot:
        zeros = zeros >> 1 << 1 | one, ones = ones >> 1 << 1 | zero;
        continue;
      case MaskWord::kRange: {
        const Affine& x = view.affines[word.affine];
        const Interval own = word.sign != 0 ? side(word.row) : Interval{0, 0};
        if (word.small) {
          const bool up = x.q >= 0;
          const auto value = [&](int64_t q, int64_t k) {
            return static_cast<int32_t>(AffineAt<uint32_t>(x, box.b, box.h, q, k));
          };
          int32_t lo = value(up ? box.q_lo : box.q_hi, box.k_lo), hi = value(up ? box.q_hi : box.q_lo, box.k_hi);
          if (word.sign != 0) {
            const int32_t least = BesideSmall(own.lo), most = BesideSmall(own.hi);
            lo += word.sign > 0 ? least : -most, hi += word.sign > 0 ? most : -least;
          }
          found = RangeInterval<int32_t>(word, lo, hi);
        } else {
          Interval v = AffineInterval(x, box);
          if (word.sign != 0) {
            const int64_t least = Beside(own.lo), most = Beside(own.hi);
            v.lo += word.sign > 0 ? least : -most, v.hi += word.sign > 0 ? most : -least;
          }
          found = RangeInterval<int64_t>(word, v.lo, v.hi);
        }
        break;
      }
      case MaskWord::kLinear: {
        Interval v = AffineInterval(view.affines[word.affine], box);
        if (word.row >= 0) {
          const Interval own = side(word.row);
          v.lo -= Beside(own.hi), v.hi -= Beside(own.lo);
        }
        found = CompareInterval(word.op, v, {word.constant, word.constant});
        break;
      }
      case MaskWord::kAbs:
        found = CompareInterval(word.op, AbsInterval(AffineInterval(view.affines[word.affine], box)),
                                {word.constant, word.constant});
        break;
      case MaskWord::kMod:
        found = CompareInterval(word.op, RestInterval(AffineInterval(view.affines[word.affine], box), word.limit),
                                {word.constant, word.constant});
        break;
      case MaskWord::kOuter:
        found = CompareInterval(word.op, side(word.row), side(word.key));
        break;
      case MaskWord::kKeys:
        found = CompareInterval(ExprOp::kNe, side(word.key), {0, 0});
        break;
      default:  // kBytes, kPairs
        if (kIntervals &&
            (word.kind == MaskWord::kPairs || view.operands[view.steps[word.first + 1].operand].blocks >= 0)) {
          MaskView part = view;
          part.steps += word.first, part.count = word.count;
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
  if (slope < 0) op = Mirrored(op);
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
STOF_HOST_DEVICE uint32_t RestBits(const MaskWord& word, int32_t rest) {
  if (word.limit <= 32) return static_cast<uint32_t>(word.pattern >> rest);
  const int64_t v = rest - word.constant;
  const uint32_t before = BitsBelow(word.limit - rest);
  return (before & LineBits(word.op, v, 1)) | (~before & LineBits(word.op, v - word.limit, 1));
}

// A query's two words of keys k0 ... k0 + 31 and k0 + 32 ... k0 + 63, of which k0 is one of the problem; bits of keys
// beyond it mean nothing. `lanes` gives what lanes of a warp do together, one query each:
//   Row(side): that side's value of the query;
//   Outer(word, b, h, k0, bits), Keys(...), Bytes(...), Pairs(...): both words of such a step.
template <typename Lanes>
STOF_HOST_DEVICE void EvaluateWords(const MaskView& view, int64_t b, int64_t h, int64_t q, int64_t k0,
                                    const Lanes& lanes, uint32_t (&top)[2]) {
  uint32_t stack[kMaskStack][2];
  int depth = 0;  // entries below `top`
  for (int i = 0; i < view.words_count; ++i) {
    const MaskWord& word = view.words[i];
    if (word.kind == MaskWord::kNot) {
      top[0] = ~top[0], top[1] = ~top[1];
      continue;
    }
    if (word.kind == MaskWord::kAnd || word.kind == MaskWord::kOr) {
      --depth;
      const uint32_t x = stack[depth][0], y = stack[depth][1];
      if (word.kind == MaskWord::kAnd) {
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
    switch (word.kind) {
      case MaskWord::kOuter:
        lanes.Outer(word, b, h, k0, top);
        continue;
      case MaskWord::kKeys:
        lanes.Keys(word, b, h, k0, top);
        continue;
      case MaskWord::kBytes:
        lanes.Bytes(word, b, h, k0, top);
        continue;
      case MaskWord::kPairs:
        lanes.Pairs(word, b, h, k0, top);
        continue;
      default:
        break;
    }
    const Affine& x = view.affines[word.affine];
    if (word.kind == MaskWord::kRange && word.small) {
      auto v = static_cast<int32_t>(AffineAt<uint32_t>(x, b, h, q, k0));
      if (word.sign != 0) v += word.sign * BesideSmall(lanes.Row(word.row));
      const auto constant = static_cast<int32_t>(word.constant), limit = static_cast<int32_t>(word.limit);
      STOF_UNROLL
      for (int w = 0; w < 2; ++w) {
        const int32_t own = x.k != 0 ? v + 32 * w : v;
        if (x.k != 0) {
          top[w] = BitsBelow(limit - own);
          if (word.bounded) top[w] &= ~BitsBelow(constant - own);
        } else {
          top[w] = own < limit && (!word.bounded || own >= constant) ? ~0u : 0u;
        }
        if (word.inverted) top[w] = ~top[w];
      }
      continue;
    }
    if (word.kind == MaskWord::kMod && word.small) {
      const int32_t rest = Rest(static_cast<int32_t>(AffineAt<uint32_t>(x, b, h, q, k0)), word.limit);
      top[0] = RestBits(word, rest);
      top[1] = RestBits(word, Rest(int64_t{rest} + 32, word.limit));
      continue;
    }
    using U = uint64_t;
    const U first = AffineAt<U>(x, b, h, q, k0);
    if (word.kind == MaskWord::kRange) {
      const auto v = static_cast<int64_t>(
          first + (word.sign != 0 ? static_cast<U>(word.sign * Beside(lanes.Row(word.row))) : U{0}));
      STOF_UNROLL
      for (int w = 0; w < 2; ++w) {
        const int64_t own = x.k != 0 ? v + 32 * w : v;
        if (x.k != 0) {
          top[w] = BitsBelow(word.limit - own);
          if (word.bounded) top[w] &= ~BitsBelow(word.constant - own);
        } else {
          top[w] = own < word.limit && (!word.bounded || own >= word.constant) ? ~0u : 0u;
        }
        if (word.inverted) top[w] = ~top[w];
      }
      continue;
    }
    if (word.kind == MaskWord::kMod) {
      int32_t rest = Rest(static_cast<int64_t>(first), word.limit);
      top[0] = RestBits(word, rest);
      top[1] = RestBits(word, Rest(int64_t{rest} + 32, word.limit));
      continue;
    }
    const U own = word.kind == MaskWord::kLinear && word.row >= 0 ? static_cast<U>(Beside(lanes.Row(word.row))) : U{0};
    STOF_UNROLL
    for (int w = 0; w < 2; ++w) {
      const auto v = static_cast<int64_t>(first + static_cast<U>(32 * w) * static_cast<U>(x.k) - own);
      top[w] = word.kind == MaskWord::kAbs ? AbsBits(word.op, v, x.k, word.constant)
                                           : LineBits(word.op, Plus(v, -word.constant), x.k);
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_PROGRAM_MASK_WORDS_H_
