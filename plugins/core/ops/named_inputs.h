// SPDX-License-Identifier: Apache-2.0
// The inputs of a node by index, with names for messages, and checks of their types and shapes.
#ifndef STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_
#define STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_

#include <algorithm>
#include <initializer_list>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

class NamedInputs {
 public:
  NamedInputs(const Tensor* tensors, int count, const char* const* names)
      : tensors_(tensors), count_(count), names_(names) {}
  // Whether optional input i is given.
  bool Has(int i) const { return i < count_ && tensors_[i].dtype != DType::kUndefined; }
  const Tensor& operator[](int i) const { return tensors_[i]; }
  int count() const { return count_; }
  std::string Name(int i) const { return names_[i]; }

  Status CheckCount(int least, int most) const {
    if (count_ >= least && count_ <= most) return Status();
    return Status::Error("has " + std::to_string(count_) + " inputs, expected " + std::to_string(least) + " to " +
                         std::to_string(most));
  }

  Status Unexpected(int input, const std::string& expected) const {
    const Tensor& found = tensors_[input];
    return Status::Error(Name(input) + " has shape " + ShapeText(found) + " and data type " + TypeText(found.dtype) +
                         ", expected " + expected);
  }

  // Type and exact shape of an input that is there.
  Status Check(int input, DType dtype, std::initializer_list<int64_t> dims) const {
    if (!Has(input)) return Status::Error(Name(input) + " is missing");
    const Tensor& found = tensors_[input];
    const Tensor expected = TensorOfShape(dtype, dims);
    if (found.dtype == dtype && found.rank == expected.rank &&
        std::equal(found.dims, found.dims + found.rank, expected.dims)) {
      return Status();
    }
    return Unexpected(input, ShapeText(expected) + " and " + TypeText(dtype));
  }

  // Two inputs of which both or none are given.
  Status CheckPair(int first, int second) const {
    if (Has(first) == Has(second)) return Status();
    const int missing = Has(first) ? second : first;
    return Status::Error(Name(missing) + " is missing, expected it beside " + Name(missing == first ? second : first));
  }

  // Inputs that a node may not have, since no kernel reads them.
  Status CheckAbsent(std::initializer_list<int> reserved) const {
    for (const int input : reserved) {
      if (Has(input)) {
        return Status::Error(Name(input) + " is given, expected none: this build does not read it");
      }
    }
    return Status();
  }

  // Every input that has elements has data.
  Status CheckData() const {
    for (int i = 0; i < count_; ++i) {
      if (Has(i) && tensors_[i].data == nullptr && tensors_[i].Elements() > 0) {
        return Status::Error(Name(i) + " has no data");
      }
    }
    return Status();
  }

 private:
  const Tensor* tensors_;
  int count_;
  const char* const* names_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_
