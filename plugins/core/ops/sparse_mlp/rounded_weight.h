// SPDX-License-Identifier: Apache-2.0
// A constant weight of a sparse MLP, rounded to bf16: few tokens wait for weights, and bf16 has half of the bytes.
#ifndef STOF_PLUGINS_CORE_OPS_SPARSE_MLP_ROUNDED_WEIGHT_H_
#define STOF_PLUGINS_CORE_OPS_SPARSE_MLP_ROUNDED_WEIGHT_H_

#include <cstdint>

#include "plugins/core/contract/op.h"
#include "plugins/core/host/huge_pages.h"

namespace stof {

class RoundedWeight {
 public:
  // Keeps a rounded copy of a constant fp32 weight. Returns whether there is one: others, and those for which memory
  // does not suffice, are read as they are.
  bool Round(const Tensor& weight);
  // The copy; nullptr where there is none, or the weight has another shape.
  const uint16_t* Find(const Tensor& weight) const;

 private:
  HugePageArray<uint16_t> values_;
  int64_t rows_ = 0, columns_ = 0;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_SPARSE_MLP_ROUNDED_WEIGHT_H_
