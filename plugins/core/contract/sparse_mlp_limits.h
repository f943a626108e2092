// SPDX-License-Identifier: Apache-2.0
// What StofSparseMLP takes. These numbers are written here alone: the operator, its kernels and stof_op_limits (for
// Python) read them.
#ifndef STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_LIMITS_H_
#define STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_LIMITS_H_

#include <cstdint>

#include "plugins/core/base/types.h"

namespace stof {

struct SparseMlpLimits {
  static constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  // Of T, K, F, N and R.
  static constexpr int64_t kMostSize = (int64_t{1} << 31) - 1;
  static constexpr int64_t kSmallestBlock = 16;
  static constexpr int64_t kLargestBlock = 256;
  static constexpr int kMostAccuracyLevel = 4;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_SPARSE_MLP_LIMITS_H_
