// SPDX-License-Identifier: Apache-2.0
// A chain and the shapes of one run: sizes of the axes, the proof that every index is in range, strides.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plugins/core/chain/chain.h"

namespace stof {
namespace {

using Wide = __int128;  // no product of three 63-bit numbers overflows silently where two are checked

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

Status AtLine(int line, const std::string& message) {
  return Status::Error("chain, line " + std::to_string(line) + ": " + message);
}

// The positions at which a node's value is wanted; empty where first > last for one axis.
struct Box {
  int64_t first[kChainMostAxes] = {};
  int64_t last[kChainMostAxes] = {};
  bool empty = true;
};

void Widen(const Box& by, int axes, Box* box) {
  if (by.empty) return;
  if (box->empty) {
    *box = by;
    return;
  }
  for (int i = 0; i < axes; ++i) {
    box->first[i] = std::min(box->first[i], by.first[i]);
    box->last[i] = std::max(box->last[i], by.last[i]);
  }
}

// The part of a box where `axis op value` holds; == and != only cut where a box remains.
void Cut(ChainOp op, int axis, double value, Box* box) {
  if (box->empty) return;
  int64_t& first = box->first[axis];
  int64_t& last = box->last[axis];
  // So that conversions are exact: no axis is as long.
  const double limit = 0x1p40;
  const auto at = static_cast<int64_t>(std::min(std::max(value, -limit), limit));
  const bool whole = static_cast<double>(at) == value;
  if (std::isnan(value) || !whole) return;
  switch (op) {
    case ChainOp::kLt:
      last = std::min(last, at - 1);
      break;
    case ChainOp::kLe:
      last = std::min(last, at);
      break;
    case ChainOp::kGt:
      first = std::max(first, at + 1);
      break;
    case ChainOp::kGe:
      first = std::max(first, at);
      break;
    case ChainOp::kEq:
      first = std::max(first, at);
      last = std::min(last, at);
      break;
    case ChainOp::kNe:
      if (first == at) ++first;
      if (first <= last && last == at) --last;
      break;
    default:
      break;
  }
  box->empty = first > last;
}

ChainOp Opposite(ChainOp op) {
  switch (op) {
    case ChainOp::kLt:
      return ChainOp::kGe;
    case ChainOp::kLe:
      return ChainOp::kGt;
    case ChainOp::kGt:
      return ChainOp::kLe;
    case ChainOp::kGe:
      return ChainOp::kLt;
    case ChainOp::kEq:
      return ChainOp::kNe;
    default:
      return ChainOp::kEq;
  }
}
// a op b as b op a.
ChainOp SwapComparison(ChainOp op) {
  switch (op) {
    case ChainOp::kLt:
      return ChainOp::kGt;
    case ChainOp::kLe:
      return ChainOp::kGe;
    case ChainOp::kGt:
      return ChainOp::kLt;
    case ChainOp::kGe:
      return ChainOp::kLe;
    default:
      return op;
  }
}

class Binder {
 public:
  Binder(const Chain& chain, const Tensor* inputs, int input_count, BoundChain* bound)
      : chain_(chain), inputs_(inputs), input_count_(input_count), bound_(*bound) {}

  Status Run() {
    bound_ = BoundChain();
    STOF_RETURN_IF_ERROR(CheckInputs());
    STOF_RETURN_IF_ERROR(Sizes());
    Boxes();
    bound_.reads.resize(chain_.reads.size());
    for (size_t i = 0; i < chain_.reads.size(); ++i) STOF_RETURN_IF_ERROR(Read(static_cast<int>(i)));
    for (size_t i = 0; i < chain_.outputs.size(); ++i) STOF_RETURN_IF_ERROR(Output(static_cast<int>(i)));
    return CheckWork();
  }

 private:
  Status CheckInputs() const {
    if (input_count_ < chain_.inputs) {
      return Status::Error("has " + std::to_string(input_count_) + " inputs, but the chain names x" +
                           std::to_string(chain_.inputs - 1));
    }
    if (input_count_ > kChainMostInputs) {
      return Status::Error("has " + std::to_string(input_count_) + " inputs, expected at most 16");
    }
    for (int i = 0; i < chain_.inputs; ++i) {
      const Tensor& tensor = inputs_[i];
      bool named = false;
      for (const ChainAxis& axis : chain_.axes) named = named || axis.input == i;
      bool read = false;
      for (const ChainRead& one : chain_.reads) read = read || one.input == i;
      if (!named && !read) continue;
      const std::string name = "x" + std::to_string(i);
      if (tensor.dtype == DType::kUndefined) return Status::Error("input " + name + " is missing");
      if (read && !IsFloat(tensor.dtype)) {
        return Status::Error("input " + name + " has data type " + TypeText(tensor.dtype) +
                             ", expected fp32, fp16 or bf16");
      }
      Wide elements = 1;
      bool none = false;
      for (int d = 0; d < tensor.rank; ++d) {
        if (tensor.dims[d] < 0) {
          return Status::Error("input " + name + " has shape " + ShapeText(tensor) + ", expected sizes of 0 or more");
        }
        none = none || tensor.dims[d] == 0;
        if (tensor.dims[d] > 0) elements *= tensor.dims[d];
        if (elements > kMost / 8) return Status::Error("input " + name + " is too large: " + ShapeText(tensor));
      }
    }
    return Status();
  }

  Status Sizes() {
    bound_.axes = static_cast<int>(chain_.axes.size());
    Wide rows = 1;
    bool none = false;
    for (int i = 0; i < bound_.axes; ++i) {
      const ChainAxis& axis = chain_.axes[static_cast<size_t>(i)];
      int64_t size = axis.value;
      if (axis.input >= 0) {
        const Tensor& tensor = inputs_[axis.input];
        const std::string name = "x" + std::to_string(axis.input);
        if (axis.dim >= tensor.rank) {
          return AtLine(1, "axis " + axis.name + ": found input " + name + " of shape " + ShapeText(tensor) +
                               ", expected a dimension " + std::to_string(axis.dim));
        }
        size = tensor.dims[axis.dim];
        if (size % axis.over != 0) {
          return AtLine(1, "axis " + axis.name + ": found size " + std::to_string(size) + " of " + name + "." +
                               std::to_string(axis.dim) + ", expected a multiple of " + std::to_string(axis.over));
        }
        size /= axis.over;
      }
      bound_.size[i] = size;
      none = none || size == 0;
      whole_.last[i] = size - 1;
      if (size > 0) rows *= size;
      if (rows > kMost / 8) return AtLine(1, "found axes whose product does not fit 60 bits, expected smaller ones");
    }
    whole_.empty = none;
    bound_.n = bound_.size[bound_.axes - 1];
    bound_.rows = 1;
    for (int i = 0; i + 1 < bound_.axes; ++i) bound_.rows *= bound_.size[i];
    return Status();
  }

  // From the outputs down: the positions at which each node's value is used. Nodes follow their arguments, so that one
  // backward pass sees every use of a node before the node.
  void Boxes() {
    boxes_.assign(chain_.nodes.size(), Box());
    // An output without the row's axis is written once a row, however long the row is.
    for (const ChainOutput& output : chain_.outputs) {
      Box box = whole_;
      const bool varies = chain_.VariesAlongRow(output.node);
      if (!varies && bound_.rows > 0) {
        box.empty = false;
        box.last[chain_.last()] = std::max<int64_t>(0, box.last[chain_.last()]);
      }
      Widen(box, bound_.axes, &boxes_[static_cast<size_t>(output.node)]);
    }
    for (size_t i = chain_.nodes.size(); i-- > 0;) {
      const ChainNode& node = chain_.nodes[i];
      const Box& box = boxes_[i];
      if (node.op == ChainOp::kSelect) {
        Select(node, box);
        continue;
      }
      for (int a = 0; a < ArityOf(node.op); ++a) {
        Box wanted = box;
        if (IsReduction(node.op)) {  // of all elements of the row
          wanted.first[chain_.last()] = 0;
          wanted.last[chain_.last()] = bound_.n - 1;
          wanted.empty = wanted.empty || bound_.n == 0;
        }
        Widen(wanted, bound_.axes, &boxes_[static_cast<size_t>(node.arg[a])]);
      }
    }
  }

  void Select(const ChainNode& node, const Box& box) {
    const ChainNode& condition = chain_.nodes[static_cast<size_t>(node.arg[0])];
    Box taken = box, other = box;
    if (condition.op >= ChainOp::kLt && condition.op <= ChainOp::kNe) {
      const ChainNode& left = chain_.nodes[static_cast<size_t>(condition.arg[0])];
      const ChainNode& right = chain_.nodes[static_cast<size_t>(condition.arg[1])];
      if (left.op == ChainOp::kAxis && right.op == ChainOp::kConstant) {
        Cut(condition.op, left.which, right.value, &taken);
        Cut(Opposite(condition.op), left.which, right.value, &other);
      } else if (left.op == ChainOp::kConstant && right.op == ChainOp::kAxis) {
        Cut(SwapComparison(condition.op), right.which, left.value, &taken);
        Cut(Opposite(SwapComparison(condition.op)), right.which, left.value, &other);
      }
    }
    Widen(box, bound_.axes, &boxes_[static_cast<size_t>(node.arg[0])]);
    Widen(taken, bound_.axes, &boxes_[static_cast<size_t>(node.arg[1])]);
    Widen(other, bound_.axes, &boxes_[static_cast<size_t>(node.arg[2])]);
  }

  Status Read(int which) {
    const ChainRead& read = chain_.reads[static_cast<size_t>(which)];
    const Tensor& tensor = inputs_[read.input];
    const std::string name = "x" + std::to_string(read.input);
    BoundRead& bound = bound_.reads[static_cast<size_t>(which)];
    bound.input = read.input;
    bound.dtype = tensor.dtype;
    if (tensor.rank != static_cast<int>(read.index.size())) {
      return AtLine(read.line, "found " + std::to_string(read.index.size()) + " indices of " + name +
                                   ", expected one for each dimension of its shape " + ShapeText(tensor));
    }
    Box box;
    for (size_t i = 0; i < chain_.nodes.size(); ++i) {
      const ChainNode& node = chain_.nodes[i];
      if (node.op == ChainOp::kRead && node.which == which) box = boxes_[i];
    }
    bound.never = box.empty;
    for (int i = 0; i < bound_.axes; ++i) {
      if (box.empty) break;
      bool indexes = false;  // an axis that no index names cannot lead out of range
      for (const ChainIndex& index : read.index) indexes = indexes || index.coefficient[i] != 0;
      if (!indexes) box.first[i] = 0, box.last[i] = bound_.size[i] - 1;
      bound.first[i] = box.first[i];
      bound.last[i] = box.last[i];
      bound.guarded = bound.guarded || box.first[i] > 0 || box.last[i] < bound_.size[i] - 1;
    }
    if (box.empty) return Status();
    int64_t stride = 1;
    for (int d = tensor.rank; d-- > 0;) {
      const ChainIndex& index = read.index[static_cast<size_t>(d)];
      STOF_RETURN_IF_ERROR(Prove(index, box, tensor, d, read.line, name));
      if (index.kind == ChainIndex::Kind::kPlain) {
        // Modulo 2^64: single terms may overflow where their sum is in range.
        bound.constant = Plus(bound.constant, index.constant, stride);
        for (int i = 0; i < bound_.axes; ++i) bound.stride[i] = Plus(bound.stride[i], index.coefficient[i], stride);
      } else {
        bound.parts.push_back({index, stride});
      }
      stride *= std::max<int64_t>(1, tensor.dims[d]);
    }
    // Along an axis of one element there is no next one.
    for (int i = 0; i < bound_.axes; ++i) {
      if (box.first[i] == box.last[i] && box.first[i] == 0) bound.stride[i] = 0;
    }
    return Status();
  }
  static int64_t Plus(int64_t sum, int64_t factor, int64_t stride) {
    return static_cast<int64_t>(static_cast<uint64_t>(sum) +
                                static_cast<uint64_t>(factor) * static_cast<uint64_t>(stride));
  }

  Status Prove(const ChainIndex& index, const Box& box, const Tensor& tensor, int dim, int line,
               const std::string& name) const {
    Wide low = index.constant, high = index.constant;
    for (int i = 0; i < bound_.axes; ++i) {
      const Wide c = index.coefficient[i];
      low += c * (c > 0 ? box.first[i] : box.last[i]);
      high += c * (c > 0 ? box.last[i] : box.first[i]);
    }
    if (low < -(kMost / 4) || high > kMost / 4) {
      return AtLine(line, "found an index of " + name + " that does not fit 61 bits, expected a smaller one");
    }
    auto first = static_cast<int64_t>(low), last = static_cast<int64_t>(high);
    const auto floor = [&](int64_t x) {
      return x >= 0 ? x / index.divisor : -((-x + index.divisor - 1) / index.divisor);
    };
    if (index.kind == ChainIndex::Kind::kQuotient) {
      first = floor(first), last = floor(last);
    } else if (index.kind == ChainIndex::Kind::kModulo) {
      if (floor(first) == floor(last)) {
        const int64_t down = floor(first) * index.divisor;
        first -= down, last -= down;
      } else {
        first = 0, last = index.divisor - 1;
      }
    }
    if (first >= 0 && last < tensor.dims[dim]) return Status();
    return AtLine(line, "found an index of " + std::to_string(first) + " to " + std::to_string(last) +
                            " in dimension " + std::to_string(dim) + " of " + name + ", expected 0 to " +
                            std::to_string(tensor.dims[dim] - 1) + " (its shape is " + ShapeText(tensor) + ")");
  }

  Status Output(int which) {
    const ChainOutput& output = chain_.outputs[static_cast<size_t>(which)];
    BoundOutput bound;
    bound.dtype = output.type;
    bound.rank = static_cast<int>(output.dims.size());
    Wide stride = 1;
    for (int d = bound.rank; d-- > 0;) {
      Wide size = 1;
      const std::vector<int>& axes = output.dims[static_cast<size_t>(d)];
      for (size_t a = axes.size(); a-- > 0;) {
        // Products of sizes without the empty ones fit: they were checked.
        bound.stride[axes[a]] = static_cast<int64_t>(stride);
        stride *= std::max<int64_t>(1, bound_.size[axes[a]]);
        size *= bound_.size[axes[a]];
      }
      bound.dims[d] = static_cast<int64_t>(size);
    }
    bound_.outputs.push_back(bound);
    return Status();
  }

  // A run cannot be interrupted, and its time is the product of the axes. That of a row which is written or read as a
  // whole follows from the tensors; a row that is only summed may be of any length.
  Status CheckWork() const {
    // Of empty rows, each is an element of an output, or none is computed.
    const Wide positions = static_cast<Wide>(bound_.rows) * bound_.n;
    const Wide values = static_cast<Wide>(chain_.nodes.size());
    Wide elements = 0;
    for (const BoundOutput& output : bound_.outputs) {
      Wide count = 1;
      for (int d = 0; d < output.rank; ++d) count *= output.dims[d];
      elements += count;
    }
    for (size_t i = 0; i < chain_.reads.size(); ++i) {
      if (!bound_.reads[i].never) elements += ReadElements(chain_.reads[i]);
    }
    if (positions <= kChainMostPositions * elements || positions * values <= kChainMostWork) return Status();
    return AtLine(1, "found axes whose product is " + Digits(positions) + " with " + Digits(values) +
                         " values to compute at each position, but only " + Digits(elements) +
                         " elements to read and write; expected at most " + std::to_string(kChainMostPositions) +
                         " positions for each element, or " + std::to_string(kChainMostWork) +
                         " values altogether: shorten a row that no input is read along");
  }
  // How many elements of its input a read may touch: no more than there are, or than its axes have positions.
  Wide ReadElements(const ChainRead& read) const {
    const Tensor& tensor = inputs_[read.input];
    Wide all = 1, touched = 1;
    for (int d = 0; d < tensor.rank; ++d) all *= tensor.dims[d];
    for (int i = 0; i < bound_.axes; ++i) {
      const bool indexes = std::any_of(read.index.begin(), read.index.end(),
                                       [i](const ChainIndex& index) { return index.coefficient[i] != 0; });
      if (indexes) touched *= bound_.size[i];
    }
    return std::min(all, touched);
  }
  static std::string Digits(Wide number) { return std::to_string(static_cast<int64_t>(number)); }

  const Chain& chain_;
  const Tensor* const inputs_;
  const int input_count_;
  BoundChain& bound_;
  Box whole_;
  std::vector<Box> boxes_;
};

}  // namespace

Status BindChain(const Chain& chain, const Tensor* inputs, int input_count, BoundChain* bound) {
  return Binder(chain, inputs, input_count, bound).Run();
}

}  // namespace stof
