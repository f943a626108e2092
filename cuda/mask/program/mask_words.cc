// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/program/mask_words.h"

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

class WordMaker {
 public:
  WordMaker(const ExprSizes& sizes, MaskProgram* program) : sizes_(sizes), program_(*program) {}

  void Make() {
    Describe();
    Emit(static_cast<int32_t>(program_.steps.size()) - 1);
  }

 private:
  const MaskStep& Step(int32_t i) const { return program_.steps[static_cast<size_t>(i)]; }
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
      const MaskStep& step = Step(i);
      Part part;
      part.first = i;
      int arguments = 2;
      if (step.op == ExprOp::kConst) {
        arguments = 0;
        part.q = AffineOf(i)->q != 0, part.k = AffineOf(i)->k != 0;
      } else if (step.op == ExprOp::kLookup) {
        arguments = step.arg;
      } else if (step.mode != MaskStep::kStack || step.op == ExprOp::kNeg || step.op == ExprOp::kAbs ||
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

  void Join(MaskWord::Kind kind) {
    MaskWord word;
    word.kind = kind;
    program_.words.push_back(word);
  }

  // The value of step i, a boolean.
  void Emit(int32_t i) {
    const ExprOp op = Step(i).op;
    const Part& part = Of(i);
    if (op == ExprOp::kNot) {
      Emit(part.left);
      return Join(MaskWord::kNot);
    }
    if (op == ExprOp::kAnd || op == ExprOp::kOr) {
      Emit(part.left);
      Emit(part.right);
      return Join(op == ExprOp::kAnd ? MaskWord::kAnd : MaskWord::kOr);
    }
    MaskWord word;
    if (!AsAffine(i, &word) && !AsSides(i, &word)) AsPairs(i, &word);
    if (word.kind == MaskWord::kLinear || word.kind == MaskWord::kAbs) ToRange(&word);
    if (word.kind == MaskWord::kRange || word.kind == MaskWord::kMod) word.small = IsSmall(word);
    program_.words.push_back(word);
  }

  // A line or a distance whose factor of k is 1, -1 or 0 as a range.
  void ToRange(MaskWord* word) {
    const Affine affine = program_.affines[static_cast<size_t>(word->affine)];
    if (affine.k < -1 || affine.k > 1) return;
    const int64_t c = word->constant;
    const bool distance = word->kind == MaskWord::kAbs;
    switch (word->op) {
      case ExprOp::kLt:
      case ExprOp::kGe:
        word->limit = c, word->inverted = word->op == ExprOp::kGe;
        if (distance) word->constant = 1 - c;
        break;
      case ExprOp::kLe:
      case ExprOp::kGt:
        word->limit = c + 1, word->inverted = word->op == ExprOp::kGt;
        if (distance) word->constant = -c;
        break;
      default:
        if (distance) return;  // two ranges
        word->limit = c + 1, word->inverted = word->op == ExprOp::kNe;
    }
    word->bounded = distance || word->op == ExprOp::kEq || word->op == ExprOp::kNe;
    word->kind = MaskWord::kRange;
    word->sign = word->row >= 0 ? -1 : 0;
    if (affine.k != -1) return;
    // The negative: of a range below its limit that is what is at least 1 - limit.
    word->affine = Keep({-affine.b, -affine.h, -affine.q, 1, -affine.constant});
    word->sign = static_cast<int8_t>(-word->sign);
    const int64_t constant = word->constant;
    if (word->bounded) {
      word->constant = 1 - word->limit, word->limit = 1 - constant;
    } else {
      word->limit = 1 - word->limit, word->inverted = !word->inverted;
    }
  }

  bool IsSmall(const MaskWord& word) const {
    const auto fits = [](int64_t x) { return x >= -kSmall && x <= kSmall; };
    const Affine& x = program_.affines[static_cast<size_t>(word.affine)];
    int64_t sum = 0;
    const int64_t terms[5][2] = {
        {x.constant, 1}, {x.b, sizes_.B}, {x.h, sizes_.H}, {x.q, sizes_.P + sizes_.S}, {x.k, sizes_.T}};
    for (const auto& [factor, most] : terms) {
      if (!fits(factor)) return false;
      sum += (factor < 0 ? -factor : factor) * most;
    }
    return fits(sum) && fits(word.constant) && fits(word.limit);
  }

  // Comparisons with constants of what is affine but for abs or %.
  bool AsAffine(int32_t i, MaskWord* word) {
    const MaskStep& step = Step(i);
    word->op = step.op;
    if (step.op == ExprOp::kConst) {  // true or false
      word->kind = MaskWord::kLinear, word->op = ExprOp::kNe, word->affine = step.arg;
      return true;
    }
    if (!IsCompare(step.op) || step.mode != MaskStep::kImmediate) return false;
    word->constant = program_.affines[static_cast<size_t>(step.arg)].constant;
    if (word->constant < -kLargestInteger || word->constant > kLargestInteger) return false;
    const int32_t left = Of(i).left;
    if (AffineOf(left) != nullptr) {
      word->kind = MaskWord::kLinear, word->affine = Step(left).arg;
      return true;
    }
    const int32_t under = Of(left).left;
    const Affine* affine = under < 0 ? nullptr : AffineOf(under);
    if (affine == nullptr) return false;
    if (Step(left).op == ExprOp::kAbs && word->constant >= 0) {
      word->kind = MaskWord::kAbs, word->affine = Step(under).arg;
      return true;
    }
    if (Step(left).op != ExprOp::kMod || Step(left).mode == MaskStep::kStack) return false;
    if (affine->k != 1 && affine->k != -1) return false;
    if (Step(left).mode == MaskStep::kShift) {
      if (Step(left).arg > 30) return false;
      word->limit = int64_t{1} << Step(left).arg;
    } else {
      word->limit = program_.affines[static_cast<size_t>(Step(left).arg)].constant;
    }
    if (word->limit <= 0 || word->limit > std::numeric_limits<int32_t>::max()) return false;
    word->kind = MaskWord::kMod, word->affine = Step(under).arg;
    if (affine->k == -1) {  // x % m = m - 1 - (-x - 1) % m
      const Affine mirrored = {-affine->b, -affine->h, -affine->q, 1, -affine->constant - 1};
      word->affine = Keep(mirrored);
      word->op = Mirrored(word->op);
      word->constant = word->limit - 1 - word->constant;
    }
    for (int64_t at = 0; at < 64; ++at) {
      if (Compare<int64_t>(word->op, at % word->limit, word->constant)) word->pattern |= uint64_t{1} << at;
    }
    return true;
  }

  // Comparisons of a number of the query with a number of the key.
  bool AsSides(int32_t i, MaskWord* word) {
    const MaskStep& step = Step(i);
    const Part& part = Of(i);
    *word = MaskWord();
    if (IsCompare(step.op) && step.mode == MaskStep::kStack) {
      const int32_t left = part.left, right = part.right;
      for (const bool swapped : {false, true}) {
        const int32_t line = swapped ? right : left, other = swapped ? left : right;
        if (AffineOf(line) == nullptr || Of(other).k) continue;
        word->kind = MaskWord::kLinear, word->affine = Step(line).arg;
        word->op = swapped ? Mirrored(step.op) : step.op;
        return Side(other, false, &word->row);
      }
      for (const bool swapped : {false, true}) {
        const int32_t row = swapped ? right : left, key = swapped ? left : right;
        if (Of(row).k || Of(key).q || !Of(row).q || !Of(key).k) continue;
        word->kind = MaskWord::kOuter;
        word->op = swapped ? Mirrored(step.op) : step.op;
        return Side(row, false, &word->row) && Side(key, true, &word->key);
      }
    }
    if (!part.k) {
      word->kind = MaskWord::kLinear, word->op = ExprOp::kNe, word->affine = Keep(Affine());
      return Side(i, false, &word->row);
    }
    if (!part.q) {
      word->kind = MaskWord::kKeys;
      return Side(i, true, &word->key);
    }
    return false;
  }

  bool Side(int32_t i, bool keys, int8_t* side) {
    if (program_.sides.size() == static_cast<size_t>(kMostSides)) return false;
    *side = static_cast<int8_t>(program_.sides.size());
    program_.sides.push_back({Of(i).first, i + 1 - Of(i).first, keys ? 1 : 0});
    return true;
  }

  void AsPairs(int32_t i, MaskWord* word) {
    *word = MaskWord();
    word->kind = MaskWord::kPairs;
    word->first = static_cast<uint16_t>(Of(i).first);
    word->count = static_cast<uint16_t>(i + 1 - Of(i).first);
    const MaskStep& step = Step(i);
    if (step.op == ExprOp::kLookup && word->count == 2) {
      const MaskOperand& operand = program_.operands[step.operand];
      const bool bytes = operand.boolean != 0 && (operand.dtype == DType::kBool || operand.dtype == DType::kU8);
      if (bytes && AffineOf(i - 1) != nullptr && AffineOf(i - 1)->k == 1) {
        word->kind = MaskWord::kBytes;
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

void MakeOneWord(MaskProgram* program) {
  MaskWord word;
  word.kind = MaskWord::kPairs;
  word.count = static_cast<uint16_t>(program->steps.size());
  program->words = {word};
  program->sides.clear();
  program->by_intervals = program->by_pairs = true;
}

void MakeWords(const ExprSizes& sizes, MaskProgram* program) {
  program->words.clear();
  program->sides.clear();
  program->by_intervals = program->by_pairs = false;
  // Steps are numbered with 16 bits here; a program with more is refused for its bytes.
  if (!program->proven || program->steps.size() > std::numeric_limits<uint16_t>::max()) return MakeOneWord(program);
  WordMaker(sizes, program).Make();
}

}  // namespace cuda
}  // namespace stof
