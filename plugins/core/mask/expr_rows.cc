// SPDX-License-Identifier: Apache-2.0
// Rows of keys, element by element, in lanes of 32 bits where all values fit. Plain loops that the compiler vectorizes.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "plugins/core/mask/expr_eval.h"

namespace stof {
namespace {

bool IsPowerOfTwo(int64_t d) { return d > 0 && (d & (d - 1)) == 0; }

// One operator on two values. Divisions are handled where the divisor is known.
template <typename V>
V Apply(ExprOp op, V x, V y) {
  if (op == ExprOp::kDiv) return static_cast<V>(FloorDiv<int64_t>(x, y));
  if (op == ExprOp::kMod) return static_cast<V>(FloorMod<int64_t>(x, y));
  return Operate(op, x, y);
}

// `op` is a constant in each instance, so that the switch disappears from the loops.
template <typename V, ExprOp op>
void Loop(const V* x, const V* y, V left, V right, int64_t count, V* out) {
  if (x != nullptr && y != nullptr) {
    for (int64_t j = 0; j < count; ++j) out[j] = Apply<V>(op, x[j], y[j]);
  } else if (x != nullptr) {
    for (int64_t j = 0; j < count; ++j) out[j] = Apply<V>(op, x[j], right);
  } else {
    for (int64_t j = 0; j < count; ++j) out[j] = Apply<V>(op, left, y[j]);
  }
}

// x // d and x % d for a power of two: a shift and a mask, which round towards minus infinity by themselves.
template <typename V>
void ShiftOrMask(ExprOp op, const V* x, V divisor, int64_t count, V* out) {
  if (op == ExprOp::kMod) {
    for (int64_t j = 0; j < count; ++j) out[j] = x[j] & (divisor - 1);
    return;
  }
  int shift = 0;
  while ((divisor >> shift) != 1) ++shift;
  for (int64_t j = 0; j < count; ++j) out[j] = x[j] >> shift;
}

template <typename V>
void Dispatch(ExprOp op, const V* x, const V* y, V left, V right, int64_t count, V* out) {
  switch (op) {
#define STOF_LOOP(name) \
  case ExprOp::name:    \
    return Loop<V, ExprOp::name>(x, y, left, right, count, out);
    STOF_LOOP(kAdd)
    STOF_LOOP(kSub)
    STOF_LOOP(kMul)
    STOF_LOOP(kNeg)
    STOF_LOOP(kAbs)
    STOF_LOOP(kMin)
    STOF_LOOP(kMax)
    STOF_LOOP(kLt)
    STOF_LOOP(kLe)
    STOF_LOOP(kGt)
    STOF_LOOP(kGe)
    STOF_LOOP(kEq)
    STOF_LOOP(kNe)
    STOF_LOOP(kAnd)
    STOF_LOOP(kOr)
    STOF_LOOP(kNot)
#undef STOF_LOOP
    case ExprOp::kDiv:
      if (IsPowerOfTwo(right)) return ShiftOrMask(op, x, right, count, out);
      return Loop<V, ExprOp::kDiv>(x, y, left, right, count, out);
    default:  // kMod
      if (IsPowerOfTwo(right)) return ShiftOrMask(op, x, right, count, out);
      return Loop<V, ExprOp::kMod>(x, y, left, right, count, out);
  }
}

// Eight bytes of 0 or 1 as eight bits: the product gathers them in its top byte.
uint32_t PackEight(const uint8_t* bytes) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, 8);
  return static_cast<uint32_t>((word * 0x0102040810204080u) >> 56);
}

}  // namespace

template <typename V>
V* ExprEvaluator::Lane(int32_t i) {
  const int32_t lane = lane_[static_cast<size_t>(i)];
  if (lane < 0) return nullptr;
  if constexpr (std::is_same_v<V, int32_t>) {
    return &narrow_lanes_[static_cast<size_t>(lane * kRun)];
  } else {
    return &wide_lanes_[static_cast<size_t>(lane * kRun)];
  }
}

int64_t ExprEvaluator::Uniform(int32_t i, const Place& place) const {
  const ExprNode& node = Node(i);
  const auto value = [&](int c) { return value_[static_cast<size_t>(node.child[c])]; };
  if (const Affine* affine = AffineOf(i)) {
    const int64_t sum = AffineInterval(*affine, {place.b, place.b, place.h, place.h, place.q, place.q, 0, 0}).lo;
    return node.boolean ? CompareInterval(node.op, {sum, sum}, {0, 0}).lo : sum;
  }
  if (node.op == ExprOp::kLookup) {
    const ExprOperand& operand = *expr_.operands()[static_cast<size_t>(node.operand)];
    const ExprBinding& binding = bindings_[static_cast<size_t>(node.operand)];
    const int64_t* dims = DimsOf(operand, binding);
    int64_t flat = 0;
    for (int axis = 0; axis < node.arity; ++axis) {
      flat = flat * dims[axis] + (Broadcasts(expr_, node, axis, dims) ? 0 : value(axis));
    }
    return ReadOperand(operand, binding, flat);
  }
  if (node.arity == 0) return node.op == ExprOp::kTrue ? 1 : 0;  // all other leaves are affine
  return Apply<int64_t>(node.op, value(0), node.arity > 1 ? value(1) : 0);
}

// Whether neighbouring keys meet neighbouring elements: only the last index varies, by one a key.
bool ExprEvaluator::IsRow(const ExprNode& node, const int64_t* dims) const {
  const int last = node.arity - 1;
  for (int axis = 0; axis < last; ++axis) {
    if (!Broadcasts(expr_, node, axis, dims) && lane_[static_cast<size_t>(node.child[axis])] >= 0) return false;
  }
  const Affine* affine = AffineOf(node.child[last]);
  return affine != nullptr && affine->k == 1 && !Node(node.child[last]).boolean && !Broadcasts(expr_, node, last, dims);
}

// The element that a row of them begins with, by the numbers of the other indices and the first of the last one.
int64_t ExprEvaluator::FirstOf(const ExprNode& node, const int64_t* dims, int64_t index) const {
  int64_t first = 0;
  for (int axis = 0; axis < node.arity; ++axis) {
    const int64_t own = axis == node.arity - 1 ? index : value_[static_cast<size_t>(node.child[axis])];
    first = first * dims[axis] + (Broadcasts(expr_, node, axis, dims) ? 0 : own);
  }
  return first;
}

// Whether the mask is a table of booleans along the keys, as one without a closed form is.
bool ExprEvaluator::IsStored() const {
  if (expr_.empty()) return false;
  const ExprNode& root = Node(expr_.root());
  if (root.op != ExprOp::kLookup) return false;
  const auto at = static_cast<size_t>(root.operand);
  const ExprOperand& operand = *expr_.operands()[at];
  return operand.table && operand.boolean && operand.wide.empty() && IsRow(root, DimsOf(operand, bindings_[at]));
}

// Its elements from key k0 on.
const uint8_t* ExprEvaluator::StoredRow(const Place& place, int64_t k0) {
  const ExprNode& root = Node(expr_.root());
  const auto at = static_cast<size_t>(root.operand);
  const ExprOperand& operand = *expr_.operands()[at];
  for (const int32_t i : uniform_) value_[static_cast<size_t>(i)] = Uniform(i, place);
  const Affine& last = *AffineOf(root.child[root.arity - 1]);
  const int64_t index = AffineInterval(last, {place.b, place.b, place.h, place.h, place.q, place.q, k0, k0}).lo;
  return operand.bytes.data() + FirstOf(root, DimsOf(operand, bindings_[at]), index);
}

template <typename V>
void ExprEvaluator::Lookup(const ExprNode& node, int64_t count, V* out) {
  const ExprOperand& operand = *expr_.operands()[static_cast<size_t>(node.operand)];
  const ExprBinding& binding = bindings_[static_cast<size_t>(node.operand)];
  const int64_t* dims = DimsOf(operand, binding);
  const bool bytes = operand.table && operand.wide.empty();
  if (bytes && IsRow(node, dims)) {
    const uint8_t* data = operand.bytes.data() + FirstOf(node, dims, Lane<V>(node.child[node.arity - 1])[0]);
    for (int64_t j = 0; j < count; ++j) out[j] = data[j];
    return;
  }
  int64_t flat[kRun] = {};
  for (int axis = 0; axis < node.arity; ++axis) {
    const V* index = Lane<V>(node.child[axis]);
    if (Broadcasts(expr_, node, axis, dims)) {
      for (int64_t j = 0; j < count; ++j) flat[j] *= dims[axis];
    } else if (index == nullptr) {
      const int64_t same = value_[static_cast<size_t>(node.child[axis])];
      for (int64_t j = 0; j < count; ++j) flat[j] = flat[j] * dims[axis] + same;
    } else {
      for (int64_t j = 0; j < count; ++j) flat[j] = flat[j] * dims[axis] + index[j];
    }
  }
  if (bytes) {
    const uint8_t* data = operand.bytes.data();
    for (int64_t j = 0; j < count; ++j) out[j] = data[flat[j]];
    return;
  }
  for (int64_t j = 0; j < count; ++j) out[j] = static_cast<V>(ReadOperand(operand, binding, flat[j]));
}

template <typename V>
void ExprEvaluator::Varying(int32_t i, const Place& place, int64_t k0, int64_t count) {
  const ExprNode& node = Node(i);
  V* const out = Lane<V>(i);
  if (const Affine* affine = AffineOf(i)) {
    // Wraps around on the way, arrives at what Check proved to fit.
    using U = std::make_unsigned_t<V>;
    const auto base = static_cast<U>(static_cast<uint64_t>(
        AffineInterval(*affine, {place.b, place.b, place.h, place.h, place.q, place.q, k0, k0}).lo));
    const auto step = static_cast<U>(static_cast<uint64_t>(affine->k));
    for (int64_t j = 0; j < count; ++j) out[j] = static_cast<V>(base + step * static_cast<U>(j));
    if (node.boolean) Dispatch<V>(node.op, out, nullptr, 0, 0, count, out);
    return;
  }
  if (node.op == ExprOp::kLookup) return Lookup<V>(node, count, out);
  const int32_t second = node.arity > 1 ? node.child[1] : node.child[0];
  const auto left = static_cast<V>(value_[static_cast<size_t>(node.child[0])]);
  const auto right = static_cast<V>(value_[static_cast<size_t>(second)]);
  const V* y = node.arity > 1 ? Lane<V>(second) : nullptr;
  Dispatch<V>(node.op, Lane<V>(node.child[0]), y, left, right, count, out);
}

template <typename V>
void ExprEvaluator::Run(const Place& place, int64_t k0, int64_t count, uint8_t* allowed) {
  for (int64_t at = 0; at < count; at += kRun) {
    const int64_t run = std::min(kRun, count - at);
    for (const int32_t i : varying_) Varying<V>(i, place, k0 + at, run);
    const V* lane = Lane<V>(expr_.root());
    for (int64_t j = 0; j < run; ++j) allowed[at + j] = static_cast<uint8_t>(lane[j]);
  }
}

void ExprEvaluator::Row(int64_t b, int64_t h, int64_t q, int64_t k0, int64_t count, uint8_t* allowed) {
  const Place place = {b, h, q};
  for (const int32_t i : uniform_) value_[static_cast<size_t>(i)] = Uniform(i, place);
  if (expr_.empty() || lane_[static_cast<size_t>(expr_.root())] < 0) {
    const bool all = expr_.empty() || value_[static_cast<size_t>(expr_.root())] != 0;
    std::memset(allowed, all ? 1 : 0, static_cast<size_t>(count));
  } else if (narrow_) {
    Run<int32_t>(place, k0, count, allowed);
  } else {
    Run<int64_t>(place, k0, count, allowed);
  }
}

int64_t ExprEvaluator::Tile(int64_t b, int64_t h, int64_t q0, int64_t k0, int64_t rows, int64_t keys, int64_t words,
                            uint32_t* bits) {
  int64_t ones = 0;
  uint8_t allowed[kRun];
  const bool stored = IsStored();
  for (int64_t i = 0; i < rows; ++i) {
    uint32_t* row = bits + i * words;
    const uint8_t* elements = stored && keys > 0 ? StoredRow({b, h, q0 + i}, k0) : nullptr;
    for (int64_t at = 0; at < words * 32; at += kRun) {
      const int64_t count = std::clamp<int64_t>(keys - at, 0, kRun);
      const uint8_t* run = allowed;
      if (stored && count >= std::min(kRun, words * 32 - at)) {
        run = elements + at;
      } else {
        std::memset(allowed, 0, sizeof allowed);
        if (count > 0 && stored) std::memcpy(allowed, elements + at, static_cast<size_t>(count));
        if (count > 0 && !stored) Row(b, h, q0 + i, k0 + at, count, allowed);
      }
      for (int64_t w = at / 32; w < std::min(words, (at + kRun) / 32); ++w) {
        const uint8_t* bytes = run + (w * 32 - at);
        row[w] =
            PackEight(bytes) | PackEight(bytes + 8) << 8 | PackEight(bytes + 16) << 16 | PackEight(bytes + 24) << 24;
        ones += __builtin_popcount(row[w]);
      }
    }
  }
  return ones;
}

}  // namespace stof
