// SPDX-License-Identifier: Apache-2.0
// How large the tensors of a StofGemm node may be.
#ifndef STOF_PLUGINS_CORE_OPS_GEMM_GEMM_LIMITS_H_
#define STOF_PLUGINS_CORE_OPS_GEMM_GEMM_LIMITS_H_

#include <cstdint>
#include <limits>
#include <string>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"

namespace stof {

constexpr int64_t kMostGemmElements = std::numeric_limits<int64_t>::max() / 8;

// The number of a tensor's elements, or an error where it is too large.
inline Status CountGemmElements(const Tensor& tensor, const char* name, int64_t* count) {
  *count = 1;
  bool none = false;
  for (int i = 0; i < tensor.rank; ++i) {
    if (tensor.dims[i] < 0) {
      return Status::Error(std::string(name) + " has shape " + ShapeText(tensor) + ", expected sizes of 0 or more");
    }
    none = none || tensor.dims[i] == 0;
    if (tensor.dims[i] > 0 && __builtin_mul_overflow(*count, tensor.dims[i], count)) *count = kMostGemmElements + 1;
    if (*count > kMostGemmElements) return Status::Error(std::string(name) + " is too large: " + ShapeText(tensor));
  }
  if (none) *count = 0;
  return Status();
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_GEMM_GEMM_LIMITS_H_
