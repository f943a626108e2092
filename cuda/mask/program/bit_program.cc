// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/program/bit_program.h"

#include <limits>

namespace stof {
namespace cuda {
namespace {

// A step with all steps before it that compute its arguments.
struct Part {
  int32_t first = 0;              // of those steps
  int32_t left = -1, right = -1;  // the steps that make its arguments; of look-ups the first
  bool q = false, k = false;      // what it depends on
};

class BitCompiler {
 public:
  BitCompiler(const ExprSizes& sizes, MaskProgram* program) : sizes_(sizes), program_(*program) {}

  void Make() {
    Describe();
    Emit(static_cast<int32_t>(program_.steps.size()) - 1);
  }

 private:
  const NumberStep& Step(int32_t i) const { return program_.steps[static_cast<size_t>(i)]; }
  const Part& Of(int32_t i) const { return parts_[static_cast<size_t>(i)]; }
  const Affine* AffineOf(int32_t i) const {
    return Step(i).op == ExprOp::kConst ? &program_.affines[static_cast<size_t>(Step(i).arg)] : nullptr;
  }
  int32_t Keep(const Affine& affine) {
    program_.affines.push_back(affine);
    return static_cast<int32_t>(program_.affines.size()) - 1;
  }

  void Describe() {
    std::vector<int32_t> stack;
    for (int32_t i = 0; i < static_cast<int32_t>(program_.steps.size()); ++i) {
      const NumberStep& step = Step(i);
      Part part;
      part.first = i;
      int arguments = 2;
      if (step.op == ExprOp::kConst) {
        arguments = 0;
        part.q = AffineOf(i)->q != 0, part.k = AffineOf(i)->k != 0;
      } else if (step.op == ExprOp::kLookup) {
        arguments = step.arg;
      } else if (step.mode != NumberStep::kStack || step.op == ExprOp::kNeg || step.op == ExprOp::kAbs ||
                 step.op == ExprOp::kNot) {
        arguments = 1;
      }
      const size_t base = stack.size() - static_cast<size_t>(arguments);
      for (size_t at = base; at < stack.size(); ++at) part.q |= Of(stack[at]).q, part.k |= Of(stack[at]).k;
      if (arguments > 0) part.left = stack[base], part.first = Of(stack[base]).first;
      if (arguments > 1) part.right = stack[base + 1];
      stack.resize(base);
      stack.push_back(i);
      parts_.push_back(part);
    }
  }

  void Join(BitStep::Kind kind) {
    BitStep step;
    step.kind = kind;
    program_.bit_steps.push_back(step);
  }

  // The value of step i, a boolean.
  void Emit(int32_t i) {
    const ExprOp op = Step(i).op;
    const Part& part = Of(i);
    if (op == ExprOp::kNot) {
      Emit(part.left);
      return Join(BitStep::kNot);
    }
    if (op == ExprOp::kAnd || op == ExprOp::kOr) {
      Emit(part.left);
      Emit(part.right);
      return Join(op == ExprOp::kAnd ? BitStep::kAnd : BitStep::kOr);
    }
    BitStep step;
    if (!AsAffine(i, &step) && !AsSides(i, &step)) AsPairs(i, &step);
    if (step.kind == BitStep::kLinear || step.kind == BitStep::kAbs) ToRange(&step);
    if (step.kind == BitStep::kRange || step.kind == BitStep::kMod) step.small = IsSmall(step);
    program_.bit_steps.push_back(step);
  }

  // A line or a distance whose factor of k is 1, -1 or 0 as a range.
  void ToRange(BitStep* to) {
    const Affine affine = program_.affines[static_cast<size_t>(to->affine)];
    if (affine.k < -1 || affine.k > 1) return;
    const int64_t c = to->constant;
    const bool distance = to->kind == BitStep::kAbs;
    switch (to->op) {
      case ExprOp::kLt:
      case ExprOp::kGe:
        to->limit = c, to->inverted = to->op == ExprOp::kGe;
        if (distance) to->constant = 1 - c;
        break;
      case ExprOp::kLe:
      case ExprOp::kGt:
        to->limit = c + 1, to->inverted = to->op == ExprOp::kGt;
        if (distance) to->constant = -c;
        break;
      default:
        if (distance) return;  // two ranges
        to->limit = c + 1, to->inverted = to->op == ExprOp::kNe;
    }
    to->bounded = distance || to->op == ExprOp::kEq || to->op == ExprOp::kNe;
    to->kind = BitStep::kRange;
    to->sign = to->row >= 0 ? -1 : 0;
    if (affine.k != -1) return;
    // The negative: of a range below its limit that is what is at least 1 - limit.
    to->affine = Keep({-affine.b, -affine.h, -affine.q, 1, -affine.constant});
    to->sign = static_cast<int8_t>(-to->sign);
    const int64_t constant = to->constant;
    if (to->bounded) {
      to->constant = 1 - to->limit, to->limit = 1 - constant;
    } else {
      to->limit = 1 - to->limit, to->inverted = !to->inverted;
    }
  }

  bool IsSmall(const BitStep& step) const {
    const auto fits = [](int64_t x) { return x >= -kSmall && x <= kSmall; };
    const Affine& x = program_.affines[static_cast<size_t>(step.affine)];
    int64_t sum = 0;
    const int64_t terms[5][2] = {
        {x.constant, 1}, {x.b, sizes_.B}, {x.h, sizes_.H}, {x.q, sizes_.P + sizes_.S}, {x.k, sizes_.T}};
    for (const auto& [factor, most] : terms) {
      if (!fits(factor)) return false;
      sum += (factor < 0 ? -factor : factor) * most;
    }
    return fits(sum) && fits(step.constant) && fits(step.limit);
  }

  // Comparisons with constants of what is affine but for abs or %.
  bool AsAffine(int32_t i, BitStep* to) {
    const NumberStep& step = Step(i);
    to->op = step.op;
    if (step.op == ExprOp::kConst) {  // true or false
      to->kind = BitStep::kLinear, to->op = ExprOp::kNe, to->affine = step.arg;
      return true;
    }
    if (!IsCompare(step.op) || step.mode != NumberStep::kImmediate) return false;
    to->constant = program_.affines[static_cast<size_t>(step.arg)].constant;
    if (to->constant < -kLargestInteger || to->constant > kLargestInteger) return false;
    const int32_t left = Of(i).left;
    if (AffineOf(left) != nullptr) {
      to->kind = BitStep::kLinear, to->affine = Step(left).arg;
      return true;
    }
    const int32_t under = Of(left).left;
    const Affine* affine = under < 0 ? nullptr : AffineOf(under);
    if (affine == nullptr) return false;
    if (Step(left).op == ExprOp::kAbs && to->constant >= 0) {
      to->kind = BitStep::kAbs, to->affine = Step(under).arg;
      return true;
    }
    if (Step(left).op != ExprOp::kMod || Step(left).mode == NumberStep::kStack) return false;
    if (affine->k != 1 && affine->k != -1) return false;
    if (Step(left).mode == NumberStep::kShift) {
      if (Step(left).arg > 30) return false;
      to->limit = int64_t{1} << Step(left).arg;
    } else {
      to->limit = program_.affines[static_cast<size_t>(Step(left).arg)].constant;
    }
    if (to->limit <= 0 || to->limit > std::numeric_limits<int32_t>::max()) return false;
    to->kind = BitStep::kMod, to->affine = Step(under).arg;
    if (affine->k == -1) {  // x % m = m - 1 - (-x - 1) % m
      const Affine mirrored = {-affine->b, -affine->h, -affine->q, 1, -affine->constant - 1};
      to->affine = Keep(mirrored);
      to->op = MirrorComparison(to->op);
      to->constant = to->limit - 1 - to->constant;
    }
    for (int64_t at = 0; at < 64; ++at) {
      if (Compare<int64_t>(to->op, at % to->limit, to->constant)) to->pattern |= uint64_t{1} << at;
    }
    return true;
  }

  // Comparisons of a number of the query with a number of the key.
  bool AsSides(int32_t i, BitStep* to) {
    const NumberStep& step = Step(i);
    const Part& part = Of(i);
    *to = BitStep();
    if (IsCompare(step.op) && step.mode == NumberStep::kStack) {
      const int32_t left = part.left, right = part.right;
      for (const bool swapped : {false, true}) {
        const int32_t line = swapped ? right : left, other = swapped ? left : right;
        if (AffineOf(line) == nullptr || Of(other).k) continue;
        to->kind = BitStep::kLinear, to->affine = Step(line).arg;
        to->op = swapped ? MirrorComparison(step.op) : step.op;
        return Side(other, false, &to->row);
      }
      for (const bool swapped : {false, true}) {
        const int32_t row = swapped ? right : left, key = swapped ? left : right;
        if (Of(row).k || Of(key).q || !Of(row).q || !Of(key).k) continue;
        to->kind = BitStep::kOuter;
        to->op = swapped ? MirrorComparison(step.op) : step.op;
        return Side(row, false, &to->row) && Side(key, true, &to->key);
      }
    }
    if (!part.k) {
      to->kind = BitStep::kLinear, to->op = ExprOp::kNe, to->affine = Keep(Affine());
      return Side(i, false, &to->row);
    }
    if (!part.q) {
      to->kind = BitStep::kKeys;
      return Side(i, true, &to->key);
    }
    return false;
  }

  bool Side(int32_t i, bool keys, int8_t* side) {
    if (program_.sides.size() == static_cast<size_t>(kMostSides)) return false;
    *side = static_cast<int8_t>(program_.sides.size());
    program_.sides.push_back({Of(i).first, i + 1 - Of(i).first, keys ? 1 : 0});
    return true;
  }

  void AsPairs(int32_t i, BitStep* to) {
    *to = BitStep();
    to->kind = BitStep::kPairs;
    to->first = static_cast<uint16_t>(Of(i).first);
    to->count = static_cast<uint16_t>(i + 1 - Of(i).first);
    const NumberStep& step = Step(i);
    if (step.op == ExprOp::kLookup && to->count == 2) {
      const MaskOperand& operand = program_.operands[step.operand];
      const bool bytes = operand.boolean != 0 && (operand.dtype == DType::kBool || operand.dtype == DType::kU8);
      if (bytes && AffineOf(i - 1) != nullptr && AffineOf(i - 1)->k == 1) {
        to->kind = BitStep::kBytes;
        program_.by_intervals = program_.by_intervals || operand.blocks >= 0;
        return;
      }
    }
    program_.by_intervals = program_.by_pairs = true;
  }

  const ExprSizes& sizes_;
  MaskProgram& program_;
  std::vector<Part> parts_;
};

}  // namespace

void CompilePairs(MaskProgram* program) {
  BitStep step;
  step.kind = BitStep::kPairs;
  step.count = static_cast<uint16_t>(program->steps.size());
  program->bit_steps = {step};
  program->sides.clear();
  program->by_intervals = program->by_pairs = true;
}

void CompileBits(const ExprSizes& sizes, MaskProgram* program) {
  program->bit_steps.clear();
  program->sides.clear();
  program->by_intervals = program->by_pairs = false;
  // Steps are numbered with 16 bits here; a program with more is refused for its bytes.
  if (!program->proven || program->steps.size() > std::numeric_limits<uint16_t>::max()) return CompilePairs(program);
  BitCompiler(sizes, program).Make();
}

}  // namespace cuda
}  // namespace stof
