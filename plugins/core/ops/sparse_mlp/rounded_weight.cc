// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/sparse_mlp/rounded_weight.h"

#include "plugins/core/contract/sparse_mlp.h"
#include "plugins/core/contract/sparse_mlp_limits.h"

namespace stof {

bool RoundedWeight::Round(const Tensor& weight) {
  values_.reset();
  if (weight.data == nullptr || weight.dtype != DType::kF32 || weight.rank != 2) return false;
  for (const int64_t size : {weight.dims[0], weight.dims[1]}) {
    if (size <= 0 || size > SparseMlpLimits::kMostSize) return false;  // a run reports the size
  }
  const int64_t count = weight.dims[0] * weight.dims[1];
  values_.reset(static_cast<uint16_t*>(AllocateHugePages(static_cast<size_t>(count) * sizeof(uint16_t))));
  if (values_ == nullptr) return false;
  CpuRoundMlpWeight(BestCpuIsa(), static_cast<const float*>(weight.data), count, values_.get());
  rows_ = weight.dims[0], columns_ = weight.dims[1];
  return true;
}

const uint16_t* RoundedWeight::Find(const Tensor& weight) const {
  const bool is_same = weight.dtype == DType::kF32 && weight.dims[0] == rows_ && weight.dims[1] == columns_;
  return is_same ? values_.get() : nullptr;
}

}  // namespace stof
