// SPDX-License-Identifier: Apache-2.0
// From a bound chain to a program: which values are of a row, of an element, or the same for all rows; in which pass
// over the row each is computed, which are kept between passes, and in which registers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "cpu/chain.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kStrip = 1024;        // elements of a strip: ten registers stay in a first-level cache of 48 KiB
constexpr int64_t kBatchRow = 512;      // rows up to this are taken several at a time
constexpr int64_t kKeptRow = 64 << 10;  // of longer ones nothing is kept between passes: it would leave the cache
constexpr int64_t kColumns = 4096;      // elements of a piece of a row
constexpr int kMostFixed = 24;
constexpr int64_t kRunElements = 256;  // of a run with fewer, batches of rows from several runs are worth copying
constexpr int64_t kPieceColumns = 16;  // the least of a piece: two vectors
constexpr size_t kMostPieces = 8;

// In simple operations of one element, roughly.
double CostOf(int op) {
  switch (static_cast<ChainOp>(op)) {
    case ChainOp::kExp:
    case ChainOp::kLog:
    case ChainOp::kSigmoid:
    case ChainOp::kSilu:
    case ChainOp::kGeluTanh:
      return 12;
    case ChainOp::kSoftplus:
    case ChainOp::kTanh:
    case ChainOp::kErf:
    case ChainOp::kGelu:
    case ChainOp::kSin:
    case ChainOp::kCos:
      return 20;
    case ChainOp::kPow:
      return 60;
    case ChainOp::kSqrt:
    case ChainOp::kRsqrt:
    case ChainOp::kDiv:
    case ChainOp::kReciprocal:
      return 4;
    default:
      return 1;
  }
}

class Compiler {
 public:
  Compiler(const Chain& chain, const BoundChain& bound, int threads, ChainProgram* program)
      : chain_(chain), bound_(bound), p_(*program), threads_(threads) {}

  void Run() {
    p_ = ChainProgram();
    p_.bound = bound_;
    Simplify();
    Plan();
    Choose();
    p_.phases.resize(static_cast<size_t>(phases_));
    for (const ChainOutput& output : chain_.outputs) output_.push_back(output.node);
    for (phase_ = 0; phase_ < phases_; ++phase_) Phase();
    for (size_t i = 0; i < chain_.outputs.size(); ++i) RowOutput(static_cast<int>(i));
    Place();
    PlanAhead(&p_);
  }

 private:
  using Kind = ChainStep::Kind;
  const ChainNode& Node(int node) const { return nodes_[static_cast<size_t>(node)]; }
  bool IsConstant(int node) const { return Node(node).op == ChainOp::kConstant; }
  // One value a row.
  bool IsRow(int node) const { return !IsConstant(node) && (Node(node).axes >> chain_.last() & 1) == 0; }
  bool IsElement(int node) const { return (Node(node).axes >> chain_.last() & 1) != 0; }
  const BoundRead& ReadOf(int node) const { return bound_.reads[static_cast<size_t>(Node(node).which)]; }

  // Powers that are products, and reductions of no element, which have values of their own.
  void Simplify() {
    nodes_ = chain_.nodes;
    for (ChainNode& node : nodes_) {
      if (node.op == ChainOp::kPow && IsConstant(node.arg[1]) && Node(node.arg[1]).value == 2.0f) {
        node.op = ChainOp::kMul;
        node.arg[1] = node.arg[0];
      }
      if (!IsReduction(node.op) || bound_.n > 0) continue;
      const float inf = std::numeric_limits<float>::infinity();
      switch (node.op) {
        case ChainOp::kSum:
          node.value = 0.0f;
          break;
        case ChainOp::kMean:
          node.value = std::numeric_limits<float>::quiet_NaN();
          break;
        default:
          node.value = node.op == ChainOp::kMaxOf ? -inf : inf;
      }
      node.op = ChainOp::kConstant;
      node.axes = 0;
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {  // what follows of that
      ChainNode& node = nodes_[i];
      if (ArityOf(node.op) == 0) continue;
      node.level = 0;
      node.axes = 0;
      for (int a = 0; a < ArityOf(node.op); ++a) {
        node.level = std::max(node.level, Node(node.arg[a]).level);
        node.axes |= Node(node.arg[a]).axes;
      }
      if (!IsReduction(node.op)) continue;
      ++node.level;
      node.axes &= ~(1u << chain_.last());
    }
  }

  // Which nodes are wanted at all, and how often.
  void Plan() {
    uses_.assign(nodes_.size(), 0);
    for (const ChainOutput& output : chain_.outputs) uses_[static_cast<size_t>(output.node)] += 2;  // never fused away
    for (size_t i = nodes_.size(); i-- > 0;) {
      if (uses_[i] == 0) continue;
      for (int a = 0; a < ArityOf(nodes_[i].op); ++a) ++uses_[static_cast<size_t>(nodes_[i].arg[a])];
      phases_ = std::max(phases_, nodes_[i].level + 1);
    }
    // The last reduction's value may go to outputs of rows alone.
    const auto wanted = [this](int level) {
      for (size_t i = 0; i < nodes_.size(); ++i) {
        const int node = static_cast<int>(i);
        if (uses_[i] > 0 && nodes_[i].level >= level && (IsElement(node) || nodes_[i].level > level)) return true;
      }
      for (const ChainOutput& output : chain_.outputs) {
        if (Node(output.node).level == level && StoresElements(output)) return true;
      }
      return false;
    };
    while (phases_ > 1 && !wanted(phases_ - 1)) --phases_;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (uses_[i] > 0 && IsElement(static_cast<int>(i))) p_.cost += CostOf(static_cast<int>(nodes_[i].op));
      if (uses_[i] > 0 && IsReduction(nodes_[i].op)) p_.cost += 1;
    }
  }
  bool StoresElements(const ChainOutput& output) const {
    for (const auto& dim : output.dims) {
      if (std::find(dim.begin(), dim.end(), chain_.last()) != dim.end()) return true;
    }
    return false;
  }

  void Choose() {
    const int64_t n = std::max<int64_t>(1, bound_.n);
    const int64_t rows = std::max<int64_t>(1, bound_.rows);
    if (n <= kBatchRow && rows > 1) {
      p_.batch = static_cast<int>(std::min<int64_t>(std::min<int64_t>(rows, 256), kStrip / n));
      p_.batch = std::max(p_.batch, 1);
    }
    ChooseRun();
    const int64_t strips = n <= kStrip + kStrip / 2 ? 1 : (n + kStrip - 1) / kStrip;
    p_.strip = ((n + strips - 1) / strips + 15) / 16 * 16;
    p_.columns = phases_ == 1 && p_.batch == 1 && n >= 2 * kColumns && rows < 8 * threads_;
    if (phases_ == 1) {
      for (const ChainNode& node : nodes_) p_.columns = p_.columns && !IsReduction(node.op);
    }
    keep_ = n <= kKeptRow;
    const bool fixed = keep_ && !p_.columns && rows > 4;
    fixed_.assign(nodes_.size(), 0);
    int count = 0;
    for (size_t i = 0; fixed && i < nodes_.size(); ++i) {
      const int node = static_cast<int>(i);
      if (uses_[i] == 0 || nodes_[i].axes != 1u << chain_.last() || nodes_[i].level > 0) continue;
      bool all = true;  // arguments too
      for (int a = 0; a < ArityOf(nodes_[i].op); ++a) {
        const int arg = nodes_[i].arg[a];
        all = all && (IsConstant(arg) || fixed_[static_cast<size_t>(arg)] != 0 || IsDirect(arg));
      }
      if (!all || (IsDirect(node) && p_.batch == 1) || ++count > kMostFixed) continue;
      fixed_[i] = 1;
    }
    p_.linear.assign(bound_.reads.size(), 1);
    for (size_t i = 0; i < bound_.reads.size(); ++i) {
      for (const BoundRead::Part& part : bound_.reads[i].parts) {
        if (part.index.coefficient[chain_.last()] != 0) p_.linear[i] = 0;
      }
    }
    p_.straight = IsStraight();
    register_.assign(nodes_.size(), -1);
    whole_.assign(nodes_.size(), -1);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (fixed_[i] == 0) continue;
      p_.fixed.push_back(StepOf(static_cast<int>(i), [this](int arg) { return FixedArg(arg); }));
      p_.fixed.back().dst = static_cast<int16_t>(New(ChainRegister::Kind::kFixed));
      whole_[i] = p_.fixed.back().dst;
    }
  }

  // Whether nothing depends on a row of a batch but by its distance from the first one.
  bool IsStraight() const {
    const auto has_pitch = [](int64_t pitch) { return pitch != kNoPitch; };
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (uses_[i] > 0 && nodes_[i].op == ChainOp::kAxis && nodes_[i].which != chain_.last()) return false;
    }
    return std::all_of(p_.read_pitch.begin(), p_.read_pitch.end(), has_pitch) &&
           std::all_of(p_.output_pitch.begin(), p_.output_pitch.end(), has_pitch) &&
           std::all_of(p_.linear.begin(), p_.linear.end(), [](uint8_t linear) { return linear != 0; });
  }

  // Elements between neighbours of the rows of axes first and beyond, seen as one axis.
  template <typename Stride>
  int64_t Pitch(int first, Stride stride) const {
    uint64_t pitch = 0, span = 0;
    bool any = false;
    for (int axis = chain_.last(); axis-- > first;) {
      if (bound_.size[axis] == 1) continue;
      const auto own = static_cast<uint64_t>(stride(axis));
      if (any && own != span) return kNoPitch;
      if (!any) pitch = own;
      any = true;
      span = own * static_cast<uint64_t>(bound_.size[axis]);
    }
    return static_cast<int64_t>(pitch);
  }
  int64_t ReadPitch(const BoundRead& read, int first) const {
    for (int axis = first; axis < chain_.last(); ++axis) {
      if (read.guarded && (read.first[axis] > 0 || read.last[axis] < bound_.size[axis] - 1)) return kNoPitch;
      for (const BoundRead::Part& part : read.parts) {
        if (part.index.coefficient[axis] != 0) return kNoPitch;
      }
    }
    return Pitch(first, [&](int axis) { return read.stride[axis]; });
  }
  void Pitches(int first) {
    p_.read_pitch.clear(), p_.output_pitch.clear();
    for (const BoundRead& read : bound_.reads) p_.read_pitch.push_back(read.never ? kNoPitch : ReadPitch(read, first));
    for (const BoundOutput& output : bound_.outputs) {
      p_.output_pitch.push_back(Pitch(first, [&](int axis) { return output.stride[axis]; }));
    }
  }
  // As many of the outer axes, from the last, as every tensor walks through in steps of one length; batches end with
  // them, so that tensors are used where they lie.
  void ChooseRun() {
    p_.run = std::max<int64_t>(1, bound_.rows);
    int first = chain_.last();
    Pitches(first);
    if (p_.batch > 1) {
      int64_t run = 1;
      const auto straight = [](const std::vector<int64_t>& pitch) {
        return pitch.size() - static_cast<size_t>(std::count(pitch.begin(), pitch.end(), kNoPitch));
      };
      while (first > 0) {
        const size_t before = straight(p_.read_pitch) + straight(p_.output_pitch);
        Pitches(first - 1);
        if (run > 1 && straight(p_.read_pitch) + straight(p_.output_pitch) < before) break;
        run *= bound_.size[--first];
      }
      if (run * bound_.n < kRunElements) first = 0, run = p_.run;
      Pitches(first);
      p_.run = run;
      const int64_t batches = (run + p_.batch - 1) / p_.batch;
      p_.batch = static_cast<int>((run + batches - 1) / batches);
    }
  }

  // A read whose elements are used where they lie.
  bool IsDirect(int node) const {
    if (Node(node).op != ChainOp::kRead) return false;
    const BoundRead& read = ReadOf(node);
    if (read.dtype != DType::kF32 || read.guarded || read.never || read.stride[chain_.last()] != 1) return false;
    for (const BoundRead::Part& part : read.parts) {
      if (part.index.coefficient[chain_.last()] != 0) return false;
    }
    return true;
  }
  int FixedArg(int node) {
    if (IsConstant(node)) return Constant(Node(node).value);
    if (whole_[static_cast<size_t>(node)] >= 0) return whole_[static_cast<size_t>(node)];
    const int direct = New(ChainRegister::Kind::kFixed);  // a read of its own that other steps do not see
    ChainStep step;
    step.kind = Kind::kRead;
    step.which = static_cast<int16_t>(Node(node).which);
    step.dst = static_cast<int16_t>(direct);
    p_.fixed.push_back(step);
    return direct;
  }

  // ---- registers ----
  int New(ChainRegister::Kind kind) {
    ChainRegister made;
    made.kind = kind;
    p_.registers.push_back(made);
    return static_cast<int>(p_.registers.size()) - 1;
  }
  int Constant(float value) {
    for (size_t i = 0; i < p_.registers.size(); ++i) {
      const ChainRegister& r = p_.registers[i];
      if (r.kind == ChainRegister::Kind::kConstant && std::signbit(r.value) == std::signbit(value) &&
          (r.value == value || (std::isnan(r.value) && std::isnan(value)))) {
        return static_cast<int>(i);
      }
    }
    const int made = New(ChainRegister::Kind::kConstant);
    p_.registers[static_cast<size_t>(made)].value = value;
    return made;
  }
  bool IsSingle(int reg, bool in_row) const {
    const auto kind = p_.registers[static_cast<size_t>(reg)].kind;
    return kind == ChainRegister::Kind::kConstant || (!in_row && kind == ChainRegister::Kind::kRow);
  }

  // A step for a node, arguments by `arg`; dst is left open.
  template <typename Arg>
  ChainStep StepOf(int node, Arg arg, bool in_row = false) {
    const ChainNode& n = Node(node);
    ChainStep step;
    if (n.op == ChainOp::kRead) {
      step.kind = in_row ? Kind::kReadRow : Kind::kRead;
      step.which = static_cast<int16_t>(n.which);
    } else if (n.op == ChainOp::kAxis) {
      step.kind = in_row ? Kind::kAxis : Kind::kIndex;
      step.which = static_cast<int16_t>(n.which);
    } else {
      step.op = static_cast<int16_t>(n.op);
      int from[3] = {-1, -1, -1};
      for (int a = 0; a < ArityOf(n.op); ++a) from[a] = arg(n.arg[a]);
      SetArguments(from, in_row, &step);
    }
    return step;
  }
  void SetArguments(const int* from, bool in_row, ChainStep* step) const {
    int16_t* const arg[3] = {&step->a, &step->b, &step->c};
    for (int i = 0; i < 3; ++i) {
      if (from[i] < 0) continue;
      *arg[i] = static_cast<int16_t>(from[i]);
      if (IsSingle(from[i], in_row)) step->mask |= static_cast<uint8_t>(1 << i);
    }
  }

  // ---- values of rows ----
  int RowValue(int node) {
    if (IsConstant(node)) return Constant(Node(node).value);
    int& known = register_[static_cast<size_t>(node)];
    if (known >= 0) return known;
    const ChainNode& n = Node(node);
    // Of a value that is the same along the row.
    if (IsReduction(n.op) && !IsElement(n.arg[0])) {
      const int arg = RowValue(n.arg[0]);
      if (n.op != ChainOp::kSum) return known = arg;
      const int from[3] = {arg, Constant(static_cast<float>(bound_.n)), -1};
      ChainStep step;
      step.op = static_cast<int16_t>(ChainOp::kMul);
      SetArguments(from, true, &step);
      step.dst = static_cast<int16_t>(known = New(ChainRegister::Kind::kRow));
      row_->push_back(step);
      return known;
    }
    ChainStep step = StepOf(node, [this](int arg) { return RowValue(arg); }, true);
    known = New(ChainRegister::Kind::kRow);
    step.dst = static_cast<int16_t>(known);
    row_->push_back(step);
    return known;
  }

  void RowOutput(int which) {
    const ChainOutput& output = chain_.outputs[static_cast<size_t>(which)];
    if (StoresElements(output)) return;
    row_ = &p_.last;
    ChainStep step;
    step.kind = Kind::kStoreRow;
    step.which = static_cast<int16_t>(which);
    step.a = static_cast<int16_t>(RowValue(output.node));
    if (IsSingle(step.a, true)) step.mask = 1;
    p_.last.push_back(step);
  }

  // ---- one pass over the row ----
  bool IsSumOfProduct(int reduction) const {
    const ChainNode& n = Node(reduction);
    return (n.op == ChainOp::kSum || n.op == ChainOp::kMean) && CanFuse(n.arg[0]) && IsElement(Node(n.arg[0]).arg[0]) &&
           IsElement(Node(n.arg[0]).arg[1]);
  }
  // A product that nothing else wants.
  bool CanFuse(int node) const {
    return Node(node).op == ChainOp::kMul && IsElement(node) && uses_[static_cast<size_t>(node)] == 1 &&
           fixed_[static_cast<size_t>(node)] == 0;
  }
  int FusedArgument(int node) const {  // of a sum or difference; -1: none
    const ChainNode& n = Node(node);
    if (n.op != ChainOp::kAdd && n.op != ChainOp::kSub) return -1;
    for (int a = 0; a < 2; ++a) {
      if (CanFuse(n.arg[a])) return a;
    }
    return -1;
  }

  void Want(int node) {
    const auto i = static_cast<size_t>(node);
    if (!IsElement(node) || fixed_[i] != 0 || wanted_[i] != 0) return;
    if (keep_ && computed_.count(node) != 0 && !IsDirect(node)) {
      kept_.push_back(node);
      return;
    }
    wanted_[i] = 1;
    const int fused = FusedArgument(node);
    for (int a = 0; a < ArityOf(Node(node).op); ++a) {
      const int arg = Node(node).arg[a];
      if (a != fused) {
        Want(arg);
        continue;
      }
      Want(Node(arg).arg[0]);
      Want(Node(arg).arg[1]);
    }
  }

  // What the pass `phase` computes. Values that a later pass wants too are found here as well.
  void WantAll(int phase) {
    wanted_.assign(nodes_.size(), 0);
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const ChainNode& n = nodes_[i];
      if (uses_[i] == 0 || !IsReduction(n.op) || !IsElement(n.arg[0]) || Node(n.arg[0]).level != phase) continue;
      if (IsSumOfProduct(static_cast<int>(i))) {
        Want(Node(n.arg[0]).arg[0]);
        Want(Node(n.arg[0]).arg[1]);
      } else {
        Want(n.arg[0]);
      }
    }
    for (size_t i = 0; i < output_.size(); ++i) {
      if (output_[i] < 0 || !StoresElements(chain_.outputs[i])) continue;
      if (Node(output_[i]).level == phase) Want(output_[i]);
    }
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (wanted_[i] != 0) computed_.insert({static_cast<int>(i), phase});
    }
  }

  void Phase() {
    if (phase_ == 0) {
      for (int phase = 0; phase < phases_; ++phase) WantAll(phase);
      computed_.clear();
      for (int node : kept_) {
        if (whole_[static_cast<size_t>(node)] < 0) {
          whole_[static_cast<size_t>(node)] = New(ChainRegister::Kind::kWhole);
        }
      }
    }
    const std::vector<int64_t> ends = Ends();
    if (ends.size() < 2) {
      Piece(0, bound_.n);
      return;
    }
    const std::vector<ChainNode> nodes = nodes_;
    const std::vector<int> uses = uses_, output = output_;
    // Copies of a read have no sides.
    bool copies = false;
    for (int& node : output_) {
      if (Node(node).op == ChainOp::kRead) {
        copies = true;
      } else {
        node = -1;
      }
    }
    if (copies) Piece(0, bound_.n);
    int64_t begin = 0;
    for (const int64_t end : ends) {
      for (size_t i = 0; i < output_.size(); ++i) {
        output_[i] = Node(output[i]).op == ChainOp::kRead ? -1 : output[i];
      }
      computed_.clear();  // by the piece before
      Take(begin);
      Piece(begin, end);
      nodes_ = nodes;
      begin = end;
    }
    uses_ = uses;
    output_ = output;
  }

  // ---- columns by columns ----
  // Whether a select asks for the column alone, and which side of a comparison the column is then.
  bool GoesByColumn(int node) const {
    if (Node(node).op != ChainOp::kSelect || fixed_[static_cast<size_t>(node)] != 0) return false;
    const ChainNode& condition = Node(Node(node).arg[0]);
    if (condition.op < ChainOp::kLt || condition.op > ChainOp::kGe) return false;
    const auto is_column = [this](int arg) {
      return Node(arg).op == ChainOp::kAxis && Node(arg).which == chain_.last();
    };
    return (is_column(condition.arg[0]) && IsConstant(condition.arg[1])) ||
           (is_column(condition.arg[1]) && IsConstant(condition.arg[0]));
  }
  bool Holds(int condition, int64_t column) const {
    const ChainNode& n = Node(condition);
    const auto value = [&](int arg) { return IsConstant(arg) ? Node(arg).value : static_cast<float>(column); };
    const float x = value(n.arg[0]), y = value(n.arg[1]);
    switch (n.op) {
      case ChainOp::kLt:
        return x < y;
      case ChainOp::kLe:
        return x <= y;
      case ChainOp::kGt:
        return x > y;
      default:
        return x >= y;
    }
  }
  // Of the pieces in which every such select takes one side.
  std::vector<int64_t> Ends() const {
    std::vector<int64_t> ends = {bound_.n};
    if (phases_ > 1) return ends;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (uses_[i] == 0) continue;
      if (IsReduction(nodes_[i].op)) return {bound_.n};
      if (!GoesByColumn(static_cast<int>(i))) continue;
      const int condition = nodes_[i].arg[0];
      int64_t low = 0, high = bound_.n;  // the first column that differs from column 0
      while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (Holds(condition, middle) == Holds(condition, 0)) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      ends.push_back(low);
    }
    if (ends.size() == 1) return ends;
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    int64_t begin = 0;
    for (const int64_t end : ends) {
      if (end - begin < kPieceColumns) return {bound_.n};
      begin = end;
    }
    return ends.size() > kMostPieces ? std::vector<int64_t>{bound_.n} : ends;
  }
  // Nodes as they are in the piece from column `begin` on.
  void Take(int64_t begin) {
    std::vector<int> same(nodes_.size());
    for (size_t i = 0; i < nodes_.size(); ++i) {
      same[i] = static_cast<int>(i);
      ChainNode& n = nodes_[i];
      if (GoesByColumn(static_cast<int>(i))) same[i] = same[static_cast<size_t>(n.arg[Holds(n.arg[0], begin) ? 1 : 2])];
      for (int a = 0; a < ArityOf(n.op); ++a) n.arg[a] = same[static_cast<size_t>(n.arg[a])];
    }
    for (int& node : output_) node = node < 0 ? -1 : same[static_cast<size_t>(node)];
    Count();
    // x + -y * z is x - y * z to the bit.
    for (ChainNode& n : nodes_) {
      if (n.op != ChainOp::kAdd) continue;
      for (int a = 0; a < 2 && n.op == ChainOp::kAdd; ++a) {
        if (!CanFuse(n.arg[a])) continue;
        ChainNode& product = nodes_[static_cast<size_t>(n.arg[a])];
        for (int& factor : product.arg) {
          if (&factor == &product.arg[2] || n.op != ChainOp::kAdd || Node(factor).op != ChainOp::kNeg) continue;
          factor = Node(factor).arg[0];
          n.op = ChainOp::kSub;
        }
        if (n.op == ChainOp::kSub && a == 0) std::swap(n.arg[0], n.arg[1]);
      }
    }
    Count();
  }
  void Count() {
    uses_.assign(nodes_.size(), 0);
    for (const int node : output_) {
      if (node >= 0) uses_[static_cast<size_t>(node)] += 2;
    }
    for (size_t i = nodes_.size(); i-- > 0;) {
      for (int a = 0; uses_[i] > 0 && a < ArityOf(nodes_[i].op); ++a) ++uses_[static_cast<size_t>(nodes_[i].arg[a])];
    }
  }

  void Piece(int64_t begin, int64_t end) {
    WantAll(phase_);
    ChainPhase& phase = p_.phases[static_cast<size_t>(phase_)];
    phase.pieces.emplace_back();
    ChainPiece& piece = phase.pieces.back();
    piece.begin = begin, piece.end = end;
    row_ = &phase.row;
    element_ = &piece.element;
    value_.assign(nodes_.size(), -1);
    expanded_.clear();
    OwnOutputs();
    for (size_t i = 0; i < nodes_.size(); ++i) {
      const int node = static_cast<int>(i);
      if (wanted_[i] != 0) Compute(node);
      const ChainNode& n = nodes_[i];
      if (uses_[i] > 0 && IsReduction(n.op) && IsElement(n.arg[0]) && Node(n.arg[0]).level == phase_) Reduce(node);
    }
    for (size_t i = 0; i < chain_.outputs.size(); ++i) StoreElements(static_cast<int>(i));
    Reuse(&piece.element);
  }

  // Values that are computed where they are wanted: in a dense fp32 output.
  void OwnOutputs() {
    own_.assign(nodes_.size(), -1);
    for (size_t i = 0; i < chain_.outputs.size(); ++i) {
      const int node = output_[i];
      const BoundOutput& out = bound_.outputs[i];
      if (node < 0 || Node(node).level != phase_ || out.dtype != DType::kF32 || !StoresElements(chain_.outputs[i]))
        continue;
      if (out.stride[chain_.last()] != 1 || !IsElement(node) || whole_[static_cast<size_t>(node)] >= 0) continue;
      if (Node(node).op == ChainOp::kRead) continue;
      own_[static_cast<size_t>(node)] = static_cast<int>(i);
    }
  }

  int Element(int node) {
    if (IsConstant(node)) return Constant(Node(node).value);
    const auto i = static_cast<size_t>(node);
    if (IsElement(node)) {
      if (fixed_[i] != 0 || (whole_[i] >= 0 && value_[i] < 0)) return whole_[i];
      return value_[i];
    }
    const int row = RowValue(node);
    return p_.batch == 1 || IsSingle(row, true) ? row : Expand(row);
  }
  int Expand(int row) {
    const auto known = expanded_.find(row);
    if (known != expanded_.end()) return known->second;
    ChainStep step;
    step.kind = Kind::kExpand;
    step.a = static_cast<int16_t>(row);
    step.dst = static_cast<int16_t>(New(ChainRegister::Kind::kStrip));
    element_->push_back(step);
    return expanded_[row] = step.dst;
  }

  void Compute(int node) {
    const auto i = static_cast<size_t>(node);
    ChainStep step;
    const int fused = FusedArgument(node);
    if (fused >= 0) {
      const ChainNode& n = Node(node);
      const ChainNode& product = Node(n.arg[fused]);
      const int from[3] = {Element(product.arg[0]), Element(product.arg[1]), Element(n.arg[1 - fused])};
      step.op = n.op == ChainOp::kAdd ? kFusedMulAdd : fused == 0 ? kFusedMulSub : kFusedSubMul;
      SetArguments(from, false, &step);
    } else {
      step = StepOf(node, [this](int arg) { return Element(arg); });
    }
    int dst = whole_[i];
    if (dst < 0) {
      dst = New(own_[i] >= 0 ? ChainRegister::Kind::kOutput : ChainRegister::Kind::kStrip);
      p_.registers[static_cast<size_t>(dst)].output = own_[i];
    }
    step.dst = static_cast<int16_t>(dst);
    value_[i] = dst;
    element_->push_back(step);
  }

  void Reduce(int node) {
    const ChainNode& n = Node(node);
    ChainStep step;
    step.kind = Kind::kReduce;
    step.op = static_cast<int16_t>(n.op);
    if (IsSumOfProduct(node)) {
      step.a = static_cast<int16_t>(Element(Node(n.arg[0]).arg[0]));
      step.b = static_cast<int16_t>(Element(Node(n.arg[0]).arg[1]));
    } else {
      step.a = static_cast<int16_t>(Element(n.arg[0]));
    }
    ChainReduction reduction;
    reduction.op = n.op;
    reduction.phase = phase_;
    reduction.row = New(ChainRegister::Kind::kRow);
    step.which = static_cast<int16_t>(p_.reductions.size());
    p_.reductions.push_back(reduction);
    register_[static_cast<size_t>(node)] = reduction.row;
    element_->push_back(step);
  }

  void StoreElements(int which) {
    const ChainOutput& output = chain_.outputs[static_cast<size_t>(which)];
    const int node = output_[static_cast<size_t>(which)];
    if (node < 0 || !StoresElements(output) || Node(node).level != phase_) return;
    int from = Element(node);
    if (IsSingle(from, false)) {
      ChainStep copy;
      copy.op = kFusedCopy;
      copy.mask = 1;
      copy.a = static_cast<int16_t>(from);
      copy.dst = static_cast<int16_t>(from = New(ChainRegister::Kind::kStrip));
      element_->push_back(copy);
    }
    ChainStep step;
    step.kind = Kind::kStore;
    step.which = static_cast<int16_t>(which);
    step.a = static_cast<int16_t>(from);
    element_->push_back(step);
  }

  // Strips that are no longer needed give their memory to later ones: the first-level cache holds what is in use.
  void Reuse(std::vector<ChainStep>* element) {
    std::vector<ChainStep>& steps = *element;
    std::map<int, size_t> last;
    for (size_t i = 0; i < steps.size(); ++i) {
      for (int reg : {steps[i].a, steps[i].b, steps[i].c, steps[i].dst}) {
        if (reg >= 0) last[reg] = i;
      }
    }
    std::vector<int> free;
    std::map<int, int> slot;
    const auto is_strip = [this](int reg) {
      return reg >= 0 && p_.registers[static_cast<size_t>(reg)].kind == ChainRegister::Kind::kStrip;
    };
    int used = 0;
    for (size_t i = 0; i < steps.size(); ++i) {
      // Arguments that end here first: a step may write over them, element by element.
      for (int reg : {steps[i].a, steps[i].b, steps[i].c}) {
        if (is_strip(reg) && last[reg] == i && slot.count(reg) != 0 && slot[reg] >= 0) {
          free.push_back(slot[reg]);
          slots_[static_cast<size_t>(reg)] = slot[reg];
          slot[reg] = -1;
        }
      }
      const int dst = steps[i].dst;
      if (!is_strip(dst)) continue;
      if (free.empty()) free.push_back(used++);
      slot[dst] = free.back();
      slots_.resize(p_.registers.size(), -1);
      slots_[static_cast<size_t>(dst)] = slot[dst];
      free.pop_back();
      if (last[dst] == i) free.push_back(slot[dst]);
    }
    strips_ = std::max(strips_, used);
  }

  // Memory of a worker.
  void Place() {
    slots_.resize(p_.registers.size(), -1);
    const int64_t strip = (p_.batch > 1 ? p_.batch * bound_.n : p_.strip) + 16;
    const int64_t whole = (p_.batch > 1 ? p_.batch * bound_.n : bound_.n) + 16;
    const auto round = [](int64_t floats) { return (floats + 15) / 16 * 16; };
    // Not a multiple of 4 KiB apart, where loads would wait for stores to the same place in a page.
    const int64_t pitch = round(strip) + 16;
    p_.floats = strips_ * pitch;
    for (size_t i = 0; i < p_.registers.size(); ++i) {
      ChainRegister& r = p_.registers[i];
      int64_t size = 0;
      switch (r.kind) {
        case ChainRegister::Kind::kConstant:
          continue;
        case ChainRegister::Kind::kStrip:
          r.offset = std::max(0, slots_[i]) * pitch;
          continue;
        case ChainRegister::Kind::kRow:
          size = p_.batch;
          break;
        case ChainRegister::Kind::kOutput:
          size = strip;
          break;
        default:
          size = whole;
      }
      r.offset = p_.floats;
      p_.floats += round(size) + 16;
      if (r.kind != ChainRegister::Kind::kRow) p_.moving.push_back(static_cast<int16_t>(i));
    }
    if (strips_ == 0) p_.floats += pitch;
  }

  const Chain& chain_;
  const BoundChain& bound_;
  ChainProgram& p_;
  const int threads_;
  std::vector<ChainNode> nodes_;
  std::vector<int> uses_;
  std::vector<int> output_;  // node of each output; -1: not in this piece
  int phases_ = 1, phase_ = 0;
  bool keep_ = true;
  std::vector<uint8_t> fixed_, wanted_;
  std::vector<int> register_;  // of a row's value
  std::vector<int> whole_;     // of a value that is kept or fixed
  std::vector<int> value_;     // of an element's value in this phase
  std::vector<int> own_;
  std::vector<int> slots_;
  std::map<int, int> computed_;
  std::vector<int> kept_;
  std::map<int, int> expanded_;
  std::vector<ChainStep>* row_ = nullptr;
  std::vector<ChainStep>* element_ = nullptr;
  int strips_ = 0;
};

}  // namespace

void CompileChain(const Chain& chain, const BoundChain& bound, int threads, ChainProgram* program) {
  Compiler(chain, bound, threads, program).Run();
}

}  // namespace cpu
}  // namespace stof
