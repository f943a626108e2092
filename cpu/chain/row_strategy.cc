// SPDX-License-Identifier: Apache-2.0
// Decides how a program visits rows: several at a time or in strips, depending on strides; and which values are the
// same for all rows.
#include <algorithm>

#include "cpu/chain/compiler.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cpu {
namespace {

constexpr int64_t kStrip = 1024;        // elements of a strip: ten registers stay in a first-level cache of 48 KiB
constexpr int64_t kBatchRow = 512;      // rows up to this are taken several at a time
constexpr int64_t kKeptRow = 64 << 10;  // nothing is kept between passes of longer rows: it would leave the cache
constexpr int64_t kColumns = 4096;      // elements of a piece of a row
constexpr int kMostFixed = 24;
constexpr int64_t kRunElements = 256;  // of shorter runs, batches of rows from several runs pay the copy

}  // namespace

void ChainCompiler::Choose() {
  const int64_t n = std::max<int64_t>(1, bound_.n);
  const int64_t rows = std::max<int64_t>(1, bound_.rows);
  if (n <= kBatchRow && rows > 1) {
    p_.batch = static_cast<int>(std::min<int64_t>(std::min<int64_t>(rows, 256), kStrip / n));
    p_.batch = std::max(p_.batch, 1);
  }
  ChooseRun();
  const int64_t strips = n <= kStrip + kStrip / 2 ? 1 : CeilDiv(n, kStrip);
  p_.strip = RoundUp(CeilDiv(n, strips), 16);
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
bool ChainCompiler::IsStraight() const {
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
int64_t ChainCompiler::Pitch(int first, Stride stride) const {
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

int64_t ChainCompiler::ReadPitch(const BoundRead& read, int first) const {
  for (int axis = first; axis < chain_.last(); ++axis) {
    if (read.guarded && (read.first[axis] > 0 || read.last[axis] < bound_.size[axis] - 1)) return kNoPitch;
    for (const BoundRead::Part& part : read.parts) {
      if (part.index.coefficient[axis] != 0) return kNoPitch;
    }
  }
  return Pitch(first, [&](int axis) { return read.stride[axis]; });
}

void ChainCompiler::Pitches(int first) {
  p_.read_pitch.clear(), p_.output_pitch.clear();
  for (const BoundRead& read : bound_.reads) p_.read_pitch.push_back(read.never ? kNoPitch : ReadPitch(read, first));
  for (const BoundOutput& output : bound_.outputs) {
    p_.output_pitch.push_back(Pitch(first, [&](int axis) { return output.stride[axis]; }));
  }
}

// As many of the outer axes, from the last, as every tensor walks through in steps of one length; batches end with
// them, so that tensors are used where they lie.
void ChainCompiler::ChooseRun() {
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
    const int64_t batches = CeilDiv(run, p_.batch);
    p_.batch = static_cast<int>(CeilDiv(run, batches));
  }
}

// A read whose elements are used in place.
bool ChainCompiler::IsDirect(int node) const {
  if (Node(node).op != ChainOp::kRead) return false;
  const BoundRead& read = ReadOf(node);
  if (read.dtype != DType::kF32 || read.guarded || read.never || read.stride[chain_.last()] != 1) return false;
  for (const BoundRead::Part& part : read.parts) {
    if (part.index.coefficient[chain_.last()] != 0) return false;
  }
  return true;
}

int ChainCompiler::FixedArg(int node) {
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

}  // namespace cpu
}  // namespace stof
