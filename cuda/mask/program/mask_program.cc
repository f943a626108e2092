// SPDX-License-Identifier: Apache-2.0
#include "cuda/mask/program/mask_program.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string>

#include "cuda/mask/program/bit_program.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {
namespace cuda {
namespace {

constexpr int64_t kMostSummarized = int64_t{1} << 20;  // elements of a table; larger ones are known by their extremes
constexpr size_t kMostBytes = 96 << 10;                // of a program, in the shared memory of every device
constexpr int32_t kFewest = 64;                        // elements that are worth a summary

bool IsShift(int64_t d, int32_t* bits) {
  if (d <= 0 || (d & (d - 1)) != 0) return false;
  *bits = __builtin_ctzll(static_cast<unsigned long long>(d));
  return true;
}

// Adds one expression's operands and steps.
class Compiler {
 public:
  Compiler(const MaskExpr& expr, const ExprSizes& sizes, const MaskInputs& inputs, std::vector<std::string>* names,
           MaskProgram* program)
      : expr_(expr), sizes_(sizes), inputs_(inputs), names_(*names), program_(*program) {}

  // `need` becomes the stack that the steps need.
  Status Prepare(int* need) {
    STOF_RETURN_IF_ERROR(BindOperands());
    STOF_RETURN_IF_ERROR(Prove());
    affine_.assign(expr_.nodes().size(), -1);
    need_.assign(expr_.nodes().size(), 1);
    for (size_t i = 0; i < expr_.nodes().size(); ++i) {
      Affine affine;
      if (Fold(expr_.nodes()[i], &affine)) affine_[i] = Keep(affine);
      need_[i] = NeedOf(static_cast<int32_t>(i));
    }
    *need = need_[static_cast<size_t>(expr_.root())];
    return Status();
  }
  void Emit() { Emit(expr_.root()); }

 private:
  const ExprNode& Node(int32_t i) const { return expr_.nodes()[static_cast<size_t>(i)]; }
  const Affine* AffineOf(int32_t i) const {
    const int32_t at = affine_[static_cast<size_t>(i)];
    return at < 0 ? nullptr : &program_.affines[static_cast<size_t>(at)];
  }
  int32_t Keep(const Affine& affine) {
    program_.affines.push_back(affine);
    return static_cast<int32_t>(program_.affines.size()) - 1;
  }
  bool Sends(int32_t parent, int axis) const {  // an index that is read as 0
    const ExprNode& node = Node(parent);
    const MaskOperand& operand = program_.operands[static_cast<size_t>(slot_[static_cast<size_t>(node.operand)])];
    const ExprOp op = Node(node.child[axis]).op;
    return operand.dims[axis] == 1 && (op == ExprOp::kB || op == ExprOp::kH);
  }

  Status BindOperands() {
    slot_.assign(expr_.operands().size(), -1);
    for (size_t i = 0; i < slot_.size(); ++i) {
      const ExprOperand& operand = *expr_.operands()[i];
      const auto known = std::find(names_.begin(), names_.end(), operand.name);
      slot_[i] = static_cast<int>(known - names_.begin());
      if (known != names_.end()) continue;
      if (names_.size() == kMostOperands) return Status::Error("the mask reads more vectors and tables than 16");
      MaskOperand bound;
      STOF_RETURN_IF_ERROR(BindOne(operand, &bound));
      names_.push_back(operand.name);
      program_.operands.push_back(bound);
    }
    return Status();
  }

  Status BindOne(const ExprOperand& operand, MaskOperand* bound) {
    const Tensor* found = nullptr;
    STOF_RETURN_IF_ERROR(FindOperand(operand, inputs_, &found));
    const Tensor& tensor = *found;
    int64_t count = 1;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const int64_t dim = tensor.dims[axis];
      if (operand.table && dim != operand.dims[axis]) {
        return Status::Error(operand.name + " has another shape than when the mask was made");
      }
      bound->dims[axis] = static_cast<int32_t>(dim);
      count = dim > std::numeric_limits<int32_t>::max() || count > std::numeric_limits<int32_t>::max()
                  ? int64_t{1} << 40
                  : count * dim;
    }
    if (count < 1 || count > std::numeric_limits<int32_t>::max()) {
      return Status::Error(operand.name + " has no elements, or more than 2^31");
    }
    if (tensor.data == nullptr) return Status::Error(operand.name + " has no data");
    bound->data = tensor.data;
    bound->dtype = tensor.dtype;
    bound->boolean = operand.boolean ? 1 : 0;
    bound->count = static_cast<int32_t>(count);
    if (operand.table) {
      bound->lo = operand.lo, bound->hi = operand.hi;
    } else if (operand.boolean) {
      bound->lo = 0, bound->hi = 1;
    } else if (tensor.dtype == DType::kI32) {
      bound->lo = std::numeric_limits<int32_t>::min(), bound->hi = std::numeric_limits<int32_t>::max();
    } else {
      bound->lo = std::numeric_limits<int64_t>::min(), bound->hi = std::numeric_limits<int64_t>::max();
    }
    if (operand.table ? count > kFewest && count <= kMostSummarized : true) {
      bound->blocks = program_.pairs;
      program_.pairs += static_cast<int32_t>((count + MaskOperand::kBlock - 1) / MaskOperand::kBlock);
      bound->groups = program_.pairs;
      program_.pairs += static_cast<int32_t>((count + MaskOperand::kGroup - 1) / MaskOperand::kGroup);
    }
    return Status();
  }

  // As MaskExpr::Check, for every number that a vector of its type may hold. Where only the contents of a vector can be
  // wrong, `proven` becomes false; what is wrong for all contents is an error.
  Status Prove() {
    const ExprBox box = {0, sizes_.B - 1, 0, sizes_.H - 1, sizes_.P, sizes_.P + sizes_.S - 1, 0, sizes_.T - 1};
    struct Known {
      Interval range;
      bool is_runtime = false;  // depends on a run-time vector
    };
    std::vector<Known> known(expr_.nodes().size());
    for (size_t i = 0; i < known.size(); ++i) {
      const ExprNode& node = expr_.nodes()[i];
      Known& own = known[i];
      const auto child = [&](int c) -> Known& { return known[static_cast<size_t>(node.child[c])]; };
      for (int c = 0; c < node.arity; ++c) own.is_runtime = own.is_runtime || child(c).is_runtime;
      program_.uses_b = program_.uses_b || node.op == ExprOp::kB;
      program_.uses_h = program_.uses_h || node.op == ExprOp::kH;
      if (node.op == ExprOp::kLookup) {
        const ExprOperand& described = *expr_.operands()[static_cast<size_t>(node.operand)];
        const MaskOperand& operand = program_.operands[static_cast<size_t>(slot_[static_cast<size_t>(node.operand)])];
        for (int axis = 0; axis < node.arity; ++axis) {
          const Interval index = child(axis).range;
          if (Sends(static_cast<int32_t>(i), axis) || (index.lo >= 0 && index.hi < operand.dims[axis])) continue;
          if (!child(axis).is_runtime) {
            return Status::Error("index " + std::to_string(axis) + " of " + described.name + " runs from " +
                                 std::to_string(index.lo) + " to " + std::to_string(index.hi) + ", expected 0 to " +
                                 std::to_string(operand.dims[axis] - 1));
          }
          program_.proven = false;
        }
        own.range = {operand.lo, operand.hi};
        own.is_runtime = own.is_runtime || !described.table;
      } else if (node.arity == 0) {
        own.range = LeafInterval(node, box, sizes_);
      } else if (IsArithmetic(node.op)) {
        Interval sides[2];
        bool fits = true;
        for (int c = 0; c < node.arity; ++c) {
          const Interval x = child(c).range;
          fits = fits && x.lo >= -kLargestInteger && x.hi <= kLargestInteger;
          sides[c] = {std::clamp(x.lo, -kLargestInteger, kLargestInteger),
                      std::clamp(x.hi, -kLargestInteger, kLargestInteger)};
        }
        // Not `&&` the other way round: the range is wanted in any case.
        fits = ArithmeticInterval(node.op, sides[0], sides[1], &own.range) && fits;
        if (fits) continue;
        if (!own.is_runtime) return Status::Error("the mask expression leaves ±2^61 for these sizes");
        program_.proven = false;
        own.range = {-kLargestInteger, kLargestInteger};
      } else {
        own.range = {0, 1};
      }
    }
    return Status();
  }

  // The node as an affine form of integers; of a comparison, left minus right. False where it is not affine.
  bool Fold(const ExprNode& node, Affine* affine) const {
    if (node.op == ExprOp::kTrue || node.op == ExprOp::kFalse) {
      affine->constant = node.op == ExprOp::kTrue ? 1 : 0;
      return true;
    }
    if (IsCompare(node.op) && Node(node.child[0]).boolean) return false;
    const int arguments = node.op == ExprOp::kLookup ? 0 : node.arity;
    const Affine* left = arguments > 0 ? AffineOf(node.child[0]) : nullptr;
    const Affine* right = arguments > 1 ? AffineOf(node.child[1]) : nullptr;
    return CombineAffine(node, left, right, sizes_, affine);
  }

  // The flat index of a look-up whose indices are all affine: these are proven to be in range for every axis.
  bool Flatten(int32_t i, Affine* flat) const {
    const ExprNode& node = Node(i);
    const MaskOperand& operand = program_.operands[static_cast<size_t>(slot_[static_cast<size_t>(node.operand)])];
    int64_t scale = 1;
    for (int axis = node.arity - 1; axis >= 0; --axis) {
      if (!Sends(i, axis)) {
        const Affine* index = AffineOf(node.child[axis]);
        if (index == nullptr || !AddAffine(*index, scale, flat)) return false;
      }
      scale *= operand.dims[axis];
    }
    return true;
  }

  // ---- steps ----
  bool RightIsConstant(const ExprNode& node) const {
    if (node.arity != 2 || node.op == ExprOp::kLookup || Node(node.child[1]).boolean) return false;
    const Affine* right = AffineOf(node.child[1]);
    return right != nullptr && IsConstant(*right);
  }
  std::vector<int> AxesByNeed(const ExprNode& node) const {
    std::vector<int> axes;
    for (int axis = 0; axis < node.arity; ++axis) axes.push_back(axis);
    std::stable_sort(axes.begin(), axes.end(), [&](int x, int y) {
      return need_[static_cast<size_t>(node.child[x])] > need_[static_cast<size_t>(node.child[y])];
    });
    return axes;
  }
  int NeedOf(int32_t i) const {
    const ExprNode& node = Node(i);
    const auto need = [&](int c) { return need_[static_cast<size_t>(node.child[c])]; };
    if (AffineOf(i) != nullptr || node.arity == 0) return 1;
    if (node.op == ExprOp::kLookup) {
      Affine flat;
      if (Flatten(i, &flat)) return 1;
      int most = 1, before = 0;
      for (const int axis : AxesByNeed(node)) most = std::max(most, need(axis) + before++);
      return most;
    }
    if (node.arity == 1 || RightIsConstant(node)) return need(0);
    return need(0) == need(1) ? need(0) + 1 : std::max(need(0), need(1));
  }

  void Push(int32_t affine) { program_.steps.push_back({ExprOp::kConst, NumberStep::kStack, 0, 0, affine}); }
  void Immediate(ExprOp op, int64_t constant) {
    int32_t bits = 0;
    if ((op == ExprOp::kDiv || op == ExprOp::kMod) && IsShift(constant, &bits)) {
      // A shift of 31 or more is for 64 bits alone, as the divisor is.
      if (constant > std::numeric_limits<int32_t>::max()) program_.narrow = false;
      program_.steps.push_back({op, NumberStep::kShift, 0, 0, bits});
      return;
    }
    if (constant < std::numeric_limits<int32_t>::min() || constant > std::numeric_limits<int32_t>::max()) {
      program_.narrow = false;
    }
    Affine affine;
    affine.constant = constant;
    program_.steps.push_back({op, NumberStep::kImmediate, 0, 0, Keep(affine)});
  }

  void Emit(int32_t i) {
    const ExprNode& node = Node(i);
    if (const int32_t affine = affine_[static_cast<size_t>(i)]; affine >= 0) {
      Push(affine);
      if (node.arity == 2 && node.boolean) Immediate(node.op, 0);
      return;
    }
    if (node.op == ExprOp::kLookup) {
      const auto operand = static_cast<uint8_t>(slot_[static_cast<size_t>(node.operand)]);
      Affine flat;
      if (Flatten(i, &flat)) {
        Push(Keep(flat));
        program_.steps.push_back(
            {ExprOp::kLookup, flat.q == 0 ? NumberStep::kSame : NumberStep::kStack, operand, 0, 1});
        return;
      }
      uint8_t places = 0;
      int place = 0;
      for (const int axis : AxesByNeed(node)) {
        places = static_cast<uint8_t>(places | place++ << 2 * axis);
        if (Sends(i, axis)) {
          Push(Keep(Affine()));
        } else {
          Emit(node.child[axis]);
        }
      }
      program_.steps.push_back({ExprOp::kLookup, NumberStep::kStack, operand, places, node.arity});
      return;
    }
    if (RightIsConstant(node)) {
      Emit(node.child[0]);
      Immediate(node.op, AffineOf(node.child[1])->constant);
      return;
    }
    const bool swapped =
        node.arity == 2 && need_[static_cast<size_t>(node.child[1])] > need_[static_cast<size_t>(node.child[0])];
    Emit(node.child[swapped ? 1 : 0]);
    if (node.arity == 2) Emit(node.child[swapped ? 0 : 1]);
    program_.steps.push_back({swapped ? MirrorComparison(node.op) : node.op, NumberStep::kStack, 0, 0, 0});
    if (swapped && node.op == ExprOp::kSub) program_.steps.push_back({ExprOp::kNeg, NumberStep::kStack, 0, 0, 0});
  }

  const MaskExpr& expr_;
  const ExprSizes& sizes_;
  const MaskInputs& inputs_;
  std::vector<std::string>& names_;  // of the program's operands
  MaskProgram& program_;
  std::vector<int> slot_;        // [expression's operands] the program's
  std::vector<int32_t> affine_;  // [nodes] index into the program's affines, or -1
  std::vector<int> need_;        // [nodes] of the stack
};

// Affines that no step names (what larger ones were folded from) go, and equal ones become one.
void DropUnused(MaskProgram* program) {
  using Key = std::array<int64_t, 5>;
  std::map<Key, int32_t> places;
  std::vector<Affine> kept;
  for (NumberStep& step : program->steps) {
    if (step.op != ExprOp::kConst && step.mode != NumberStep::kImmediate) continue;
    const Affine& affine = program->affines[static_cast<size_t>(step.arg)];
    const auto [place, fresh] = places.try_emplace(Key{affine.b, affine.h, affine.q, affine.k, affine.constant},
                                                   static_cast<int32_t>(kept.size()));
    if (fresh) kept.push_back(affine);
    step.arg = place->second;
  }
  program->affines = std::move(kept);
}

}  // namespace

Status CompileMask(const MaskExpr& fixed, const MaskExpr& dynamic, const ExprSizes& sizes, const MaskInputs& inputs,
                   MaskProgram* program) {
  *program = MaskProgram();
  for (const int64_t size : {sizes.B, sizes.H, sizes.S, sizes.T, sizes.P}) {
    if (size < 0 || size > MaskExpr::kMaxSize) {
      return Status::Error("a size of " + std::to_string(size) + ", expected 0 to 2^22");
    }
  }
  std::vector<std::string> names;
  const MaskExpr* parts[2] = {&fixed, &dynamic};
  std::vector<Compiler> compilers;
  compilers.reserve(2);
  std::vector<int> needs;
  for (const MaskExpr* part : parts) {
    if (part->empty()) continue;
    STOF_RETURN_IF_ERROR(part->CheckWork(sizes));
    compilers.emplace_back(*part, sizes, inputs, &names, program);
    needs.push_back(0);
    STOF_RETURN_IF_ERROR(compilers.back().Prepare(&needs.back()));
  }
  if (compilers.empty()) return Status::Error("an empty mask needs no program");
  // The expression that needs more of the stack goes first.
  const bool swapped = needs.size() == 2 && needs[1] > needs[0];
  int need = needs[0];
  if (needs.size() == 2) need = needs[0] == needs[1] ? need + 1 : std::max(needs[0], needs[1]);
  if (need > kMaskStack) {
    return Status::Error("the mask expression nests too deep for the device (" + std::to_string(need) +
                         " values at once, expected at most " + std::to_string(kMaskStack) +
                         "): run this node on the CPU");
  }
  for (size_t i = 0; i < compilers.size(); ++i) compilers[swapped ? compilers.size() - 1 - i : i].Emit();
  if (compilers.size() == 2) program->steps.push_back({ExprOp::kAnd, NumberStep::kStack, 0, 0, 0});
  DropUnused(program);
  program->diagonal = std::all_of(program->affines.begin(), program->affines.end(),
                                  [](const Affine& affine) { return affine.q == -affine.k; }) &&
                      std::all_of(program->steps.begin(), program->steps.end(),
                                  [](const NumberStep& step) { return step.op != ExprOp::kLookup || step.arg == 1; });
  CompileBits(sizes, program);
  const auto size = [program] {
    return program->steps.size() * sizeof(NumberStep) + program->affines.size() * sizeof(Affine) +
           program->bit_steps.size() * sizeof(BitStep);
  };
  if (size() > kMostBytes) CompilePairs(program);
  const size_t bytes = size();
  if (bytes > kMostBytes) {
    return Status::Error("the mask expression is too long for the device (" + std::to_string(bytes) +
                         " bytes of shared memory, expected at most " + std::to_string(kMostBytes) +
                         "): run this node on the CPU");
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
