// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/sparse_mlp/rounded_weight.h"

#include <new>

#include "plugins/core/contract/sparse_mlp.h"
#include "plugins/core/contract/sparse_mlp_limits.h"
#include "plugins/core/host/platform.h"

namespace stof {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;

}  // namespace

void RoundedWeight::Free::operator()(uint16_t* values) const {
  ::operator delete[](values, std::align_val_t(kHugePage));
}

bool RoundedWeight::Round(const Tensor& weight) {
  values_.reset();
  if (weight.data == nullptr || weight.dtype != DType::kF32 || weight.rank != 2) return false;
  for (const int64_t size : {weight.dims[0], weight.dims[1]}) {
    if (size <= 0 || size > SparseMlpLimits::kMostSize) return false;  // a run reports the size
  }
  const int64_t count = weight.dims[0] * weight.dims[1];
  const size_t bytes = static_cast<size_t>(count) * sizeof(uint16_t);
  void* const memory = ::operator new[](bytes, std::align_val_t(kHugePage), std::nothrow);
  if (memory == nullptr) return false;
  values_.reset(static_cast<uint16_t*>(memory));
  // Weights come from memory in every run, and a table of pages of 4 KiB for all of them fits no cache.
  AdviseHugePages(memory, bytes / kHugePage * kHugePage);
  CpuRoundMlpWeight(BestCpuIsa(), static_cast<const float*>(weight.data), count, values_.get());
  rows_ = weight.dims[0], columns_ = weight.dims[1];
  return true;
}

const uint16_t* RoundedWeight::Find(const Tensor& weight) const {
  const bool is_same = weight.dtype == DType::kF32 && weight.dims[0] == rows_ && weight.dims[1] == columns_;
  return is_same ? values_.get() : nullptr;
}

}  // namespace stof
