// SPDX-License-Identifier: Apache-2.0
// The number program of a mask: integers from a stack, booleans as 0 and 1. It runs over boxes of pairs by intervals,
// and over groups of queries and one key by value. The same code on host and device, so that the host's tests cover it.
#ifndef STOF_CUDA_MASK_PROGRAM_NUMBER_PROGRAM_H_
#define STOF_CUDA_MASK_PROGRAM_NUMBER_PROGRAM_H_

#include <cstdint>
#include <type_traits>

#include "cuda/mask/program/mask_program.h"

#if defined(__CUDACC__)
#define STOF_UNROLL _Pragma("unroll")
#else
#define STOF_UNROLL
#endif

namespace stof {
namespace cuda {

// ---- elements ----
STOF_HOST_DEVICE int64_t ReadElement(const MaskOperand& operand, int64_t i) {
  int64_t value = 0;
  switch (operand.dtype) {
    case DType::kI64:
      value = static_cast<const int64_t*>(operand.data)[i];
      break;
    case DType::kI32:
      value = static_cast<const int32_t*>(operand.data)[i];
      break;
    case DType::kF32:  // pad alone, as the one below: not zero, NaN included
      value = static_cast<const float*>(operand.data)[i] != 0.0f;
      break;
    case DType::kF16:
      value = static_cast<const uint16_t*>(operand.data)[i] & 0x7fff;
      break;
    default:
      value = static_cast<const uint8_t*>(operand.data)[i];
  }
  return operand.boolean != 0 ? value != 0 : value;
}

// ---- intervals ----
// Partial sums may wrap, the sum itself fits: the host has proven it for all boxes. The form of the expression keeps
// registers low.
STOF_HOST_DEVICE Interval AffineInterval(const Affine& x, const MaskBox& box) {
  using U = uint64_t;
  const U q = static_cast<U>(x.q), k = static_cast<U>(x.k);
  const U c = static_cast<U>(x.constant) + static_cast<U>(x.b) * static_cast<U>(box.b) +
              static_cast<U>(x.h) * static_cast<U>(box.h);
  const U lo =
      c + q * static_cast<U>(x.q >= 0 ? box.q_lo : box.q_hi) + k * static_cast<U>(x.k >= 0 ? box.k_lo : box.k_hi);
  const U hi =
      c + q * static_cast<U>(x.q >= 0 ? box.q_hi : box.q_lo) + k * static_cast<U>(x.k >= 0 ? box.k_hi : box.k_lo);
  return {static_cast<int64_t>(lo), static_cast<int64_t>(hi)};
}

// Evaluation over a box. `ok` turns false where a value may leave ±2^61 on the way or an index its table: then no value
// in the box may be evaluated. `narrow`: whether all of them fit 32 bits.
class MaskIntervals {
 public:
  STOF_HOST_DEVICE explicit MaskIntervals(const MaskView& view) : view_(view), narrow_(view.narrow != 0) {}

  STOF_HOST_DEVICE Interval Run(const MaskBox& box) {
    Interval stack[kMaskStack];
    int depth = 0;
    for (int i = 0; i < view_.count; ++i) {
      const NumberStep step = view_.steps[i];
      Interval result;
      if (step.op == ExprOp::kConst) {
        result = AffineInterval(view_.affines[step.arg], box);
      } else if (step.op == ExprOp::kLookup) {
        depth -= step.arg;
        result = Lookup(step, stack + depth);
      } else if (step.op == ExprOp::kNeg || step.op == ExprOp::kAbs || step.op == ExprOp::kNot) {
        result = Apply(step.op, stack[--depth], {0, 0});
      } else if (step.mode == NumberStep::kImmediate || step.mode == NumberStep::kShift) {
        const int64_t c = step.mode == NumberStep::kShift ? int64_t{1} << step.arg : view_.affines[step.arg].constant;
        result = Apply(step.op, stack[--depth], {c, c});
      } else {
        depth -= 2;
        result = Apply(step.op, stack[depth], stack[depth + 1]);
      }
      narrow_ = narrow_ && result.lo >= INT32_MIN && result.hi <= INT32_MAX;
      stack[depth++] = result;
    }
    return stack[0];
  }
  STOF_HOST_DEVICE bool ok() const { return ok_; }
  STOF_HOST_DEVICE bool narrow() const { return narrow_; }

 private:
  static STOF_HOST_DEVICE bool IsWithin(Interval a) { return a.lo >= -kLargestInteger && a.hi <= kLargestInteger; }
  static STOF_HOST_DEVICE Interval Clamp(Interval a) {
    return {Least(Most(a.lo, -kLargestInteger), kLargestInteger), Most(Least(a.hi, kLargestInteger), -kLargestInteger)};
  }

  STOF_HOST_DEVICE Interval Apply(ExprOp op, Interval a, Interval b) {
    if (IsCompare(op)) return CompareInterval(op, a, b);
    if (!IsArithmetic(op)) return LogicInterval(op, a, b);
    Interval r;
    if (op == ExprOp::kMin || op == ExprOp::kMax) {  // gives an argument, whatever it is
      (void)ArithmeticInterval(op, a, b, &r);
      return r;
    }
    if (!IsWithin(a) || !IsWithin(b)) ok_ = false;
    if (!ArithmeticInterval(op, Clamp(a), Clamp(b), &r)) ok_ = false;
    return Clamp(r);
  }

  // ---- look-ups ----
  static STOF_HOST_DEVICE void Take(int64_t lo, int64_t hi, Interval* r) {
    r->lo = Least(r->lo, lo), r->hi = Most(r->hi, hi);
  }
  STOF_HOST_DEVICE void TakePairs(int64_t pair, int64_t begin, int64_t end, Interval* r) const {
    for (int64_t i = begin; i < end; ++i) Take(view_.summaries[2 * (pair + i)], view_.summaries[2 * (pair + i) + 1], r);
  }

  STOF_HOST_DEVICE Interval Lookup(const NumberStep& step, const Interval* indices) {
    constexpr int64_t kMostRead = 8;  // elements one by one
    const MaskOperand& operand = view_.operands[step.operand];
    int64_t lo[4], hi[4];
    int64_t first = 0, last = 0, count = 1;
    for (int axis = 0; axis < step.arg; ++axis) {
      const Interval index = indices[step.places >> 2 * axis & 3];
      const int64_t most = (step.arg == 1 ? operand.count : operand.dims[axis]) - 1;
      if (index.lo < 0 || index.hi > most) ok_ = false;
      lo[axis] = Least(Most(index.lo, 0), most), hi[axis] = Most(Least(index.hi, most), 0);
      first = first * (most + 1) + lo[axis];
      last = last * (most + 1) + hi[axis];
      count *= hi[axis] - lo[axis] + 1;
    }
    Interval r{INT64_MAX, INT64_MIN};
    const bool dense = last - first + 1 == count;
    if (count <= kMostRead || (!dense && count <= 4 * kMostRead)) {
      int64_t index[4] = {lo[0], lo[1], lo[2], lo[3]};
      for (int64_t n = 0; n < count; ++n) {
        int64_t flat = 0;
        for (int axis = 0; axis < step.arg; ++axis) flat = flat * operand.dims[axis] + index[axis];
        const int64_t value = ReadElement(operand, flat);
        Take(value, value, &r);
        for (int axis = step.arg - 1; axis >= 0 && ++index[axis] > hi[axis]; --axis) index[axis] = lo[axis];
      }
      return r;
    }
    if (operand.blocks < 0) return {operand.lo, operand.hi};
    // Whole blocks, which may hold more than was asked for: wider, never narrower.
    constexpr int64_t kPerGroup = MaskOperand::kGroup / MaskOperand::kBlock;
    const int64_t begin = first / MaskOperand::kBlock, end = last / MaskOperand::kBlock + 1;
    const int64_t head = (begin + kPerGroup - 1) / kPerGroup, tail = end / kPerGroup;
    if (head >= tail) {
      TakePairs(operand.blocks, begin, end, &r);
    } else {
      TakePairs(operand.blocks, begin, head * kPerGroup, &r);
      TakePairs(operand.groups, head, tail, &r);
      TakePairs(operand.blocks, tail * kPerGroup, end, &r);
    }
    return r;
  }

  const MaskView& view_;
  bool ok_ = true, narrow_;
};

// ---- values ----
// Queries that are evaluated at once: the more, the less each step costs beside its arithmetic.
template <typename V>
constexpr int kMaskRows = 64 / static_cast<int>(sizeof(V));

// top = left op top, or top op constant. Templates, so that loops stand inside of the switch over operators.
template <ExprOp kOp, typename V, int kRows>
STOF_HOST_DEVICE void OperateLeft(const V (&left)[kRows], V (&top)[kRows]) {
  STOF_UNROLL
  for (int r = 0; r < kRows; ++r) top[r] = Operate<V>(kOp, left[r], top[r]);
}
template <ExprOp kOp, typename V, int kRows>
STOF_HOST_DEVICE void OperateRight(V (&top)[kRows], V constant) {
  STOF_UNROLL
  for (int r = 0; r < kRows; ++r) top[r] = Operate<V>(kOp, top[r], constant);
}

template <typename E, typename V, int kRows>
STOF_HOST_DEVICE void ReadAll(const MaskOperand& operand, const V (&flat)[kRows], V (&values)[kRows]) {
  const E* data = static_cast<const E*>(operand.data);
  STOF_UNROLL
  for (int r = 0; r < kRows; ++r) values[r] = static_cast<V>(data[flat[r]]);
}
// ReadElement for all queries.
template <typename V, int kRows>
STOF_HOST_DEVICE void ReadElements(const MaskOperand& operand, const V (&flat)[kRows], V (&values)[kRows]) {
  if (operand.boolean == 0 && operand.dtype == DType::kI64) return ReadAll<int64_t>(operand, flat, values);
  if (operand.boolean == 0 && operand.dtype == DType::kI32) return ReadAll<int32_t>(operand, flat, values);
  if (operand.dtype == DType::kBool || operand.dtype == DType::kU8) {
    ReadAll<uint8_t>(operand, flat, values);
    if (operand.boolean == 0) return;
    STOF_UNROLL
    for (int r = 0; r < kRows; ++r) values[r] = values[r] != 0;
    return;
  }
  for (int r = 0; r < kRows; ++r) values[r] = static_cast<V>(ReadElement(operand, flat[r]));
}

// Evaluates the steps of `view` for queries q0 ... q0 + kRows - 1 and one key: the expression as 0 or 1. V is int32_t
// where `narrow` allows it for a box, else int64_t. For queries and keys beyond the problem the result is arbitrary.
// Longer than 80 lines: an interpreter, whose cases share the stack and its top in registers.
template <typename V, int kRows>
STOF_HOST_DEVICE void EvaluateRows(const MaskView& view, int64_t b, int64_t h, int64_t q0, int64_t k, V (&top)[kRows]) {
  using U = std::make_unsigned_t<V>;
  const auto wrap = [](int64_t x) { return static_cast<U>(static_cast<uint64_t>(x)); };
  alignas(16) V stack[kMaskStack][kRows];
  int depth = 0;  // entries below `top`
  for (int i = 0; i < view.count; ++i) {
    const NumberStep step = view.steps[i];
    if (step.op == ExprOp::kConst) {
      if (i > 0) {
        STOF_UNROLL
        for (int r = 0; r < kRows; ++r) stack[depth][r] = top[r];
        ++depth;
      }
      const Affine& affine = view.affines[step.arg];
      const U slope = wrap(affine.q);
      const U first = wrap(affine.constant) + wrap(affine.b) * wrap(b) + wrap(affine.h) * wrap(h) +
                      wrap(affine.k) * wrap(k) + slope * wrap(q0);
      STOF_UNROLL
      for (int r = 0; r < kRows; ++r) top[r] = static_cast<V>(first + slope * static_cast<U>(r));
      continue;
    }
    if (step.op == ExprOp::kLookup) {
      const MaskOperand& operand = view.operands[step.operand];
      const V last = static_cast<V>(operand.count - 1);
      if (step.mode == NumberStep::kSame) {
        const V value = static_cast<V>(ReadElement(operand, top[0] < 0 ? 0 : top[0] > last ? last : top[0]));
        STOF_UNROLL
        for (int r = 0; r < kRows; ++r) top[r] = value;
        continue;
      }
      V flat[kRows];
      if (step.arg == 1) {
        STOF_UNROLL
        for (int r = 0; r < kRows; ++r) flat[r] = top[r];
      } else {
        depth -= step.arg - 1;  // where the lowest index is; the highest is `top`
        STOF_UNROLL
        for (int r = 0; r < kRows; ++r) flat[r] = 0;
        for (int axis = 0; axis < step.arg; ++axis) {
          const int place = step.places >> 2 * axis & 3;
          const U dim = static_cast<U>(operand.dims[axis]);
          STOF_UNROLL
          for (int r = 0; r < kRows; ++r) {
            const V index = place == step.arg - 1 ? top[r] : stack[depth + place][r];
            flat[r] = static_cast<V>(static_cast<U>(flat[r]) * dim + static_cast<U>(index));
          }
        }
      }
      STOF_UNROLL
      for (int r = 0; r < kRows; ++r) flat[r] = flat[r] < 0 ? 0 : flat[r] > last ? last : flat[r];
      ReadElements(operand, flat, top);
      continue;
    }
    if (step.mode == NumberStep::kShift) {
      STOF_UNROLL
      for (int r = 0; r < kRows; ++r) {
        top[r] = step.op == ExprOp::kDiv ? top[r] >> step.arg : top[r] & ((V{1} << step.arg) - 1);
      }
      continue;
    }
    const bool popped = step.mode == NumberStep::kStack && step.op != ExprOp::kNeg && step.op != ExprOp::kAbs &&
                        step.op != ExprOp::kNot;
    if (popped) {
      --depth;
      switch (step.op) {
#define STOF_OPERATE(name)                        \
  case ExprOp::name:                              \
    OperateLeft<ExprOp::name>(stack[depth], top); \
    break;
        STOF_OPERATE(kAdd)
        STOF_OPERATE(kSub)
        STOF_OPERATE(kMul)
        STOF_OPERATE(kMin)
        STOF_OPERATE(kMax)
        STOF_OPERATE(kLt)
        STOF_OPERATE(kLe)
        STOF_OPERATE(kGt)
        STOF_OPERATE(kGe)
        STOF_OPERATE(kEq)
        STOF_OPERATE(kNe)
        STOF_OPERATE(kAnd)
        STOF_OPERATE(kOr)
#undef STOF_OPERATE
        default:
          break;
      }
      continue;
    }
    const V constant = step.mode == NumberStep::kImmediate ? static_cast<V>(view.affines[step.arg].constant) : V{0};
    switch (step.op) {
#define STOF_OPERATE(name)                     \
  case ExprOp::name:                           \
    OperateRight<ExprOp::name>(top, constant); \
    break;
      STOF_OPERATE(kAdd)
      STOF_OPERATE(kSub)
      STOF_OPERATE(kMul)
      STOF_OPERATE(kDiv)
      STOF_OPERATE(kMod)
      STOF_OPERATE(kNeg)
      STOF_OPERATE(kAbs)
      STOF_OPERATE(kNot)
      STOF_OPERATE(kMin)
      STOF_OPERATE(kMax)
      STOF_OPERATE(kLt)
      STOF_OPERATE(kLe)
      STOF_OPERATE(kGt)
      STOF_OPERATE(kGe)
      STOF_OPERATE(kEq)
      STOF_OPERATE(kNe)
#undef STOF_OPERATE
      default:
        break;
    }
  }
}

// The value of `count` steps from `first` on, for one pair within the problem.
STOF_HOST_DEVICE int64_t EvaluateOne(const MaskView& view, int first, int count, int64_t b, int64_t h, int64_t q,
                                     int64_t k) {
  MaskView part = view;
  part.steps += first, part.count = count;
  int64_t value[1] = {0};
  EvaluateRows(part, b, h, q, k, value);
  return value[0];
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_PROGRAM_NUMBER_PROGRAM_H_
