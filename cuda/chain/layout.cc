// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cuda/chain/codegen.h"

namespace stof {
namespace cuda {
namespace {

using Ref = ChainLayout::Ref;

// The largest power of two up to `most` that divides every one of the numbers it was given.
struct Alignment {
  uint64_t bits;
  explicit Alignment(uint64_t most) : bits(most) {}
  void Add(int64_t x) { bits |= static_cast<uint64_t>(x); }
  int64_t Get() const { return static_cast<int64_t>(bits & (~bits + 1)); }
};

class Layouter {
 public:
  Layouter(const Chain& chain, const BoundChain& bound, int sm_count, ChainLayout* layout)
      : chain_(chain), bound_(bound), sm_count_(sm_count), l_(*layout) {}

  bool Run(const void* const* inputs, void* const* outputs) {
    if (bound_.rows == 0 || bound_.n == 0) return false;
    l_ = ChainLayout();
    Fill();
    Merge();
    Depend();
    ChooseInner();
    ChooseVector(inputs, outputs);
    Widths(inputs, outputs);
    l_.reduces ? SplitRow() : Repeat();
    return true;
  }

 private:
  void Fill() {
    l_.axes = bound_.axes;
    std::copy_n(bound_.size, kChainMostAxes, l_.size);
    for (int i = 0; i < l_.axes; ++i) l_.of_axis[i] = i;
    for (const BoundRead& read : bound_.reads) {
      Ref ref;
      ref.tensor = read.input;
      ref.dtype = read.dtype;
      ref.never = read.never;
      ref.constant = read.constant;
      std::copy_n(read.stride, kChainMostAxes, ref.stride);
      ref.parts = read.parts;
      for (int a = 0; a < l_.axes && read.guarded; ++a) {
        ref.first[a] = read.first[a], ref.last[a] = read.last[a];
        if (read.first[a] > 0) ref.low |= 1u << a;
        if (read.last[a] < bound_.size[a] - 1) ref.high |= 1u << a;
      }
      l_.reads.push_back(std::move(ref));
    }
    for (size_t i = 0; i < bound_.outputs.size(); ++i) {
      Ref ref;
      ref.tensor = static_cast<int>(i);
      ref.dtype = bound_.outputs[i].dtype;
      std::copy_n(bound_.outputs[i].stride, kChainMostAxes, ref.stride);
      ref.once = true;
      for (const std::vector<int>& dim : chain_.outputs[i].dims) {
        if (std::find(dim.begin(), dim.end(), chain_.last()) != dim.end()) ref.once = false;
      }
      l_.outputs.push_back(std::move(ref));
    }
    std::vector<uint8_t> used(chain_.nodes.size(), 0);
    for (const ChainOutput& output : chain_.outputs) used[static_cast<size_t>(output.node)] = 1;
    for (size_t i = chain_.nodes.size(); i-- > 0;) {
      if (used[i] == 0) continue;
      const ChainNode& node = chain_.nodes[i];
      for (int a = 0; a < ArityOf(node.op); ++a) used[static_cast<size_t>(node.arg[a])] = 1;
      l_.reduces = l_.reduces || IsReduction(node.op);
      if (node.op == ChainOp::kAxis) apart_ |= 1u << node.which;
    }
    for (const Ref& ref : l_.reads) {
      apart_ |= ref.low | ref.high;
      for (const BoundRead::Part& part : ref.parts) {
        for (int a = 0; a < l_.axes; ++a) apart_ |= part.index.coefficient[a] != 0 ? 1u << a : 0;
      }
    }
    bool once = l_.reduces;
    for (const Ref& ref : l_.outputs) once = once || ref.once;
    if (once) apart_ |= 1u << chain_.last();
  }

  // Whether position i + 1 of the outer axis continues where the inner one ends.
  bool Continues(const Ref& ref, int outer) const {
    return ref.never || l_.size[outer] == 1 || l_.size[outer + 1] == 1 ||
           ref.stride[outer] == ref.stride[outer + 1] * l_.size[outer + 1];
  }

  void Merge() {
    for (int a = l_.axes - 2; a >= 0; --a) {
      if ((apart_ >> a & 3u) != 0) continue;
      bool all = true;
      for (const Ref& ref : l_.reads) all = all && Continues(ref, a);
      for (const Ref& ref : l_.outputs) all = all && Continues(ref, a);
      if (all) MergeAt(a);
    }
    l_.row = l_.of_axis[chain_.last()];
  }
  void MergeAt(int a) {
    const bool second = l_.size[a + 1] == 1;
    const auto join = [&](Ref* ref) {
      if (!second) ref->stride[a] = ref->stride[a + 1];
      for (int i = a + 1; i + 1 < l_.axes; ++i) {
        ref->stride[i] = ref->stride[i + 1];
        ref->first[i] = ref->first[i + 1], ref->last[i] = ref->last[i + 1];
      }
      ref->stride[l_.axes - 1] = 0;
      const auto shift = [a](uint32_t mask) { return (mask & ((2u << a) - 1)) | (mask >> 1 & ~((2u << a) - 1)); };
      ref->low = shift(ref->low), ref->high = shift(ref->high);
      for (BoundRead::Part& part : ref->parts) {
        int64_t* c = part.index.coefficient;
        for (int i = a + 1; i + 1 < l_.axes; ++i) c[i] = c[i + 1];
        c[l_.axes - 1] = 0;
      }
    };
    for (Ref& ref : l_.reads) join(&ref);
    for (Ref& ref : l_.outputs) join(&ref);
    l_.size[a] *= l_.size[a + 1];
    for (int i = a + 1; i + 1 < l_.axes; ++i) l_.size[i] = l_.size[i + 1];
    for (int i = 0; i < bound_.axes; ++i) l_.of_axis[i] -= l_.of_axis[i] > a ? 1 : 0;
    // Axes that stay apart lie behind a, or before it: those behind it have moved.
    apart_ = (apart_ & ((2u << a) - 1)) | (apart_ >> 1 & ~((2u << a) - 1));
    --l_.axes;
  }

  void Depend() {
    for (Ref& ref : l_.reads) {
      ref.axes = ref.low | ref.high;
      for (int a = 0; a < l_.axes; ++a) {
        if (ref.stride[a] != 0) ref.axes |= 1u << a;
        for (const BoundRead::Part& part : ref.parts) ref.axes |= part.index.coefficient[a] != 0 ? 1u << a : 0;
      }
      if (ref.never) ref.axes = 0;
    }
    const uint32_t row = 1u << l_.row;
    for (const ChainNode& node : chain_.nodes) {
      uint32_t axes = 0;
      for (int a = 0; a < ArityOf(node.op); ++a) axes |= l_.node_axes[static_cast<size_t>(node.arg[a])];
      if (node.op == ChainOp::kAxis) axes = 1u << l_.of_axis[node.which];
      if (node.op == ChainOp::kRead) axes = l_.reads[static_cast<size_t>(node.which)].axes;
      l_.node_axes.push_back(IsReduction(node.op) ? axes & ~row : axes);
    }
  }

  bool PartsTake(const Ref& ref, int axis) const {
    for (const BoundRead::Part& part : ref.parts) {
      if (part.index.coefficient[axis] != 0) return true;
    }
    return false;
  }
  void ChooseInner() {
    l_.inner = l_.row;
    if (!l_.reduces) {
      int64_t best = -1;
      for (int a = l_.axes; a-- > 0;) {
        int64_t score = a == l_.row ? 1 : 0;
        for (const Ref& ref : l_.reads) score += !ref.never && ref.stride[a] == 1 ? SizeOf(ref.dtype) : 0;
        for (const Ref& ref : l_.outputs) score += ref.stride[a] == 1 ? 2 * SizeOf(ref.dtype) : 0;
        if (l_.size[a] > 1 && score > best) best = score, l_.inner = a;
      }
    }
    const int inner = l_.inner;
    for (std::vector<Ref>* refs : {&l_.reads, &l_.outputs}) {
      for (Ref& ref : *refs) {
        const bool takes = PartsTake(ref, inner);
        ref.along = !takes && ref.stride[inner] == 1                                  ? ChainLayout::Along::kUnit
                    : takes || ref.stride[inner] != 0 || (ref.axes >> inner & 1) != 0 ? ChainLayout::Along::kGather
                                                                                      : ChainLayout::Along::kFixed;
      }
    }
  }

  int64_t BytesAligned(const Ref& ref, const void* address) const {
    Alignment alignment(16);
    const int64_t size = SizeOf(ref.dtype);
    alignment.Add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(address)) + ref.constant * size);
    for (int a = 0; a < l_.axes; ++a) {
      if (a != l_.inner && l_.size[a] > 1) alignment.Add(ref.stride[a] * size);
    }
    for (const BoundRead::Part& part : ref.parts) alignment.Add(part.stride * size);
    return alignment.Get();
  }

  void ChooseVector(const void* const* inputs, void* const* outputs) {
    Alignment elements(8);
    elements.Add(l_.size[l_.inner]);
    bool narrow = false;
    for (const std::vector<Ref>* refs : {&l_.reads, &l_.outputs}) {
      for (const Ref& ref : *refs) {
        if (ref.never || ref.along != ChainLayout::Along::kUnit) continue;
        const void* address = refs == &l_.reads ? inputs[ref.tensor] : outputs[ref.tensor];
        const int64_t bytes = BytesAligned(ref, address), size = SizeOf(ref.dtype);
        elements.Add(bytes == 16 ? 8 : bytes / size);
        if ((ref.low >> l_.inner & 1) != 0) elements.Add(ref.first[l_.inner]);
        if ((ref.high >> l_.inner & 1) != 0) elements.Add(ref.last[l_.inner] + 1);
        narrow = narrow || size < 4;
      }
    }
    if (!narrow) elements.Add(4);
    l_.vector = static_cast<int>(elements.Get());
  }
  void Widths(const void* const* inputs, void* const* outputs) {
    int64_t total = 1;
    for (int a = 0; a < l_.axes; ++a) total = total > int64_t{1} << 31 ? total : total * l_.size[a];
    l_.wide = total >= int64_t{1} << 30;  // vectors of a row are rounded up, to at most twice as many
    for (std::vector<Ref>* refs : {&l_.reads, &l_.outputs}) {
      for (Ref& ref : *refs) {
        const void* address = refs == &l_.reads ? inputs[ref.tensor] : outputs[ref.tensor];
        ref.width = static_cast<int>(std::min<int64_t>(BytesAligned(ref, address), l_.vector * SizeOf(ref.dtype)));
        double extent = 0;
        for (int a = 0; a < l_.axes; ++a) {
          extent += std::fabs(static_cast<double>(ref.stride[a])) * static_cast<double>(l_.size[a]);
        }
        for (const BoundRead::Part& part : ref.parts) {
          double affine = std::fabs(static_cast<double>(part.index.constant)) + static_cast<double>(part.index.divisor);
          for (int a = 0; a < l_.axes; ++a) {
            affine += std::fabs(static_cast<double>(part.index.coefficient[a])) * static_cast<double>(l_.size[a]);
          }
          extent += std::fabs(static_cast<double>(part.stride)) * affine + affine;
        }
        l_.wide = l_.wide || extent >= 0x1p31;
      }
    }
  }

  // A row on the threads of a part of a warp, of a warp, or of a CTA.
  void SplitRow() {
    l_.moving = 1u << l_.row;
    const int64_t vectors = bound_.n / l_.vector;
    const int most = 32 / l_.vector;  // repeats, for 32 elements a thread
    if (vectors <= 32) {
      while (l_.lanes < vectors) l_.lanes *= 2;
      return;
    }
    for (const int lanes : {32, 128, 256, 512, 1024}) {
      l_.lanes = std::min(lanes, 512);
      const int64_t wanted = (vectors + l_.lanes - 1) / l_.lanes;
      // More threads before more elements of each, up to 256.
      const int64_t here = lanes == 128 || lanes == 256 ? std::max(1, most / 2) : most;
      if (lanes == 1024 || wanted > here) continue;
      for (const int repeats : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32}) {
        l_.repeats = repeats;
        if (repeats >= wanted) return;
      }
    }
    l_.streamed = true;
    l_.repeats = 1;
  }

  // Without sums: a thread takes positions of one axis that share what is read for them, or is given several to have
  // more loads under way.
  void Repeat() {
    int64_t vectors = 1;
    for (int a = 0; a < l_.axes; ++a) vectors *= a == l_.inner ? l_.size[a] / l_.vector : l_.size[a];
    const int64_t full = int64_t{2048} * sm_count_;
    int64_t best = 0;
    for (int a = 0; a < l_.axes; ++a) {
      if (a == l_.inner || l_.size[a] < 2) continue;
      int64_t shared = 0;
      for (const Ref& ref : l_.reads) {
        const bool elements = !ref.never && (ref.axes >> l_.inner & 1) != 0;
        shared += elements && (ref.axes >> a & 1) == 0 ? SizeOf(ref.dtype) : 0;
      }
      if (shared > best) best = shared, l_.unrolled = a;
    }
    int repeats = vectors >= 16 * full ? 4 : vectors >= 2 * full ? 2 : 1;
    if (l_.unrolled < 0) repeats = std::min(repeats, 2);
    int64_t words = 0;  // of what moves
    for (const Ref& ref : l_.reads) {
      const bool moves = l_.unrolled < 0 || (ref.axes >> l_.unrolled & 1) != 0;
      if (!ref.never && (ref.axes >> l_.inner & 1) != 0 && moves) {
        words += ref.along == ChainLayout::Along::kUnit ? l_.vector * SizeOf(ref.dtype) / 4 + 1 : l_.vector;
      }
    }
    while (repeats > 1 && repeats * words > 80) repeats /= 2;
    if (repeats == 1) l_.unrolled = -1;
    Cross();
    l_.repeats = repeats;
    l_.moving = l_.unrolled >= 0 ? 1u << l_.unrolled : repeats > 1 ? (1u << l_.axes) - 1 : 0;
  }

  // Where inputs and outputs are contiguous along different axes: each thread takes neighbours along the inner one, for
  // one wide access, and threads are neighbours along the other one: two by sixteen of them use whole sectors of both.
  void Cross() {
    for (int a = 0; a < l_.axes; ++a) {
      if (a == l_.inner || a == l_.unrolled || l_.size[a] < 8) continue;
      for (const std::vector<Ref>* refs : {&l_.reads, &l_.outputs}) {
        for (const Ref& ref : *refs) {
          const bool crosses = !ref.never && ref.along == ChainLayout::Along::kGather && ref.stride[a] == 1;
          if (crosses && l_.size[l_.inner] / l_.vector >= 2) l_.crossed = a;
        }
      }
    }
  }

  const Chain& chain_;
  const BoundChain& bound_;
  const int sm_count_;
  ChainLayout& l_;
  uint32_t apart_ = 0;  // axes that stay what they are
};

}  // namespace

bool MakeChainLayout(const Chain& chain, const BoundChain& bound, const void* const* inputs, void* const* outputs,
                     int sm_count, ChainLayout* layout) {
  return Layouter(chain, bound, sm_count, layout).Run(inputs, outputs);
}

}  // namespace cuda
}  // namespace stof
