// SPDX-License-Identifier: Apache-2.0
// The tensors of a node by index, with names for messages, and checks of what they are. Every operator reads its inputs
// by it.
#ifndef STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_
#define STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

// A tensor of another type or shape than expected.
inline Status ReportWrongTensor(const std::string& name, const Tensor& found, const std::string& expected) {
  return Status::Error(name + " has shape " + ShapeText(found) + " and data type " + TypeText(found.dtype) +
                       ", expected " + expected);
}

// Type and exact shape of a tensor.
inline Status CheckTensor(const std::string& name, const Tensor& found, const Tensor& expected) {
  if (found.dtype == expected.dtype && found.rank == expected.rank &&
      std::equal(found.dims, found.dims + found.rank, expected.dims)) {
    return Status();
  }
  return ReportWrongTensor(name, found, ShapeText(expected) + " and " + TypeText(expected.dtype));
}

// Whether a tensor has elements. Their number may overflow before its shape is checked.
inline bool HasElements(const Tensor& tensor) {
  return std::all_of(tensor.dims, tensor.dims + tensor.rank, [](int64_t dim) { return dim != 0; });
}

// How an operator names its inputs: by a list, or by a function where the names depend on the node.
class InputNames {
 public:
  using Function = std::string (*)(const void* self, int input);
  InputNames(const char* const* names) : names_(names) {}  // NOLINT: implicit
  InputNames(Function name, const void* self) : name_(name), self_(self) {}
  std::string Of(int input) const { return names_ != nullptr ? names_[input] : name_(self_, input); }

 private:
  const char* const* names_ = nullptr;
  Function name_ = nullptr;
  const void* self_ = nullptr;
};

class NamedInputs {
 public:
  NamedInputs(const Tensor* tensors, int count, const InputNames& names)
      : tensors_(tensors), count_(count), names_(names) {}
  // Whether optional input i is given.
  bool Has(int i) const { return i < count_ && tensors_[i].dtype != DType::kUndefined; }
  const Tensor& operator[](int i) const { return tensors_[i]; }
  int count() const { return count_; }
  std::string Name(int i) const { return names_.Of(i); }

  Status CheckCount(int least, int most) const {
    if (count_ >= least && count_ <= most) return Status();
    return Status::Error("has " + std::to_string(count_) + " inputs, expected " + std::to_string(least) + " to " +
                         std::to_string(most));
  }

  // ---- errors ----
  Status ReportWrong(int input, const std::string& expected) const {
    return ReportWrongTensor(Name(input), tensors_[input], expected);
  }
  // "..., expected it WHY" and "..., expected none WHY".
  Status ReportMissing(int input, const std::string& why) const {
    return Status::Error(Name(input) + " is missing, expected it " + why);
  }
  Status ReportSuperfluous(int input, const std::string& why) const {
    return Status::Error(Name(input) + " is given, expected none " + why);
  }

  // ---- checks ----
  // Type and exact shape of an input that is there.
  Status Check(int input, DType dtype, std::initializer_list<int64_t> dims) const {
    return CheckDims(input, dtype, dims);
  }
  Status Check(int input, DType dtype, const std::vector<int64_t>& dims) const { return CheckDims(input, dtype, dims); }

  // Two inputs of which both or none are given.
  Status CheckPair(int first, int second) const {
    if (Has(first) == Has(second)) return Status();
    const int given = Has(first) ? first : second;
    return ReportMissing(given == first ? second : first, "beside " + Name(given));
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

  // Every input that has elements has data, but for those that are not read.
  template <typename IsRead>
  Status CheckData(const IsRead& is_read) const {
    for (int i = 0; i < count_; ++i) {
      if (Has(i) && tensors_[i].data == nullptr && HasElements(tensors_[i]) && is_read(i)) {
        return Status::Error(Name(i) + " has no data");
      }
    }
    return Status();
  }
  Status CheckData() const {
    return CheckData([](int) { return true; });
  }

 private:
  template <typename Dims>
  Status CheckDims(int input, DType dtype, const Dims& dims) const {
    if (!Has(input)) return Status::Error(Name(input) + " is missing");
    return CheckTensor(Name(input), tensors_[input], TensorOfShape(dtype, dims));
  }

  const Tensor* tensors_;
  int count_;
  InputNames names_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_NAMED_INPUTS_H_
