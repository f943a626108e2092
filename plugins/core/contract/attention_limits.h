// SPDX-License-Identifier: Apache-2.0
// What StofAttention takes. These numbers are written here alone: the operator, the checks of the CPU and CUDA kernels
// and stof_op_limits (for Python) read them. Host only; needs no device.
#ifndef STOF_PLUGINS_CORE_CONTRACT_ATTENTION_LIMITS_H_
#define STOF_PLUGINS_CORE_CONTRACT_ATTENTION_LIMITS_H_

#include <cstdint>

#include "plugins/core/base/types.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/expr.h"

namespace stof {

// Head sizes of query, key and value: 1 to `largest`, multiples of `multiple_of`.
struct HeadSizes {
  int64_t largest = 0;  // 0: the target does not take the type
  int64_t multiple_of = 1;

  constexpr bool Has(int64_t size) const { return size >= 1 && size <= largest && size % multiple_of == 0; }
};

struct AttentionLimits {
  // Element types of query, key, value and output, on every target.
  static constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
  static constexpr int64_t kLargestHeadSize = 256;  // of all targets and types
  static constexpr int64_t kMostHeads = 65536;
  // The largest batch and length. Masks have the same limit, and the optimizer's proofs (LONGEST in stof.symbolic).
  static constexpr int64_t kMostLength = MaskExpr::kMaxSize;
  static constexpr int kMostOperands = 18;
  // Rows of a relative table; on the CPU, of one that weights multiply.
  static constexpr int64_t kMostRelativeRows = int64_t{1} << 23, kMostRelativeValueRows = 1024;
  // Words of attribute `operands`, beside table0, table1, ...
  static constexpr const char* kRoles[] = {"pad",
                                           "bias",
                                           "relative_bias",
                                           "relative_bias_factor",
                                           "relative_key",
                                           "relative_key1",
                                           "relative_query",
                                           "relative_value",
                                           "sink",
                                           "segment_q",
                                           "segment_k",
                                           "lengths",
                                           "cumulative_sequence_length",
                                           "cumulative_key_length",
                                           "first_position",
                                           "unused"};

  // How many of relative_key, relative_key1, relative_query and relative_value the kernels of a target take, in this
  // order, and relative_bias_factor. The TensorRT plugin runs the CUDA kernels, but refuses the roles.
  static constexpr int64_t RelativeTablesOf(Target target) {
    return target == Target::kCpu ? 4 : target == Target::kCuda ? 3 : 0;
  }

  // Attribute skip_threshold. Not a NaN.
  static constexpr bool IsSkipThreshold(float x) { return x >= 0.0f && x <= static_cast<float>(kMostLength); }
  // Whether kernels of a target leave out key tiles by it. Function bodies and TensorRT compute all.
  static constexpr bool SkipsScores(Target target) { return target == Target::kCpu || target == Target::kCuda; }

  // Attribute block_threshold. Not a NaN.
  static constexpr bool IsBlockThreshold(float x) { return x >= 0.0f && x <= 1.0f; }
  // Whether kernels of a target leave out key blocks by it. Function bodies and TensorRT compute all.
  static constexpr bool ChoosesBlocks(Target target) { return target == Target::kCpu || target == Target::kCuda; }
  // The same of StofPagedAttention, whose CUDA kernels compute every block: what stands behind a sequence in the padded
  // copies of its queries would be part of means.
  static constexpr bool ChoosesBlocksOfPages(Target target) { return target == Target::kCpu; }
  // Attributes chosen_pages and page_rows.
  static constexpr bool IsChosenPages(int64_t x) { return x >= 0 && x <= kMostLength; }
  static constexpr bool IsPageRows(int64_t x) { return x == 16 || x == 32 || x == 64 || x == 128; }
  // Whether kernels of a target choose pages of a KV cache, and keep their key bounds. Others refuse chosen_pages.
  static constexpr bool ChoosesPages(Target target) { return target == Target::kCpu || target == Target::kCuda; }

  static constexpr HeadSizes HeadSizesOf(Target target, DType dtype) {
    if (!IsFloat(dtype)) return {};
    // The CUDA kernels, which the TensorRT plugin runs, too, copy rows 16 bytes at a time; those of fp32 can do
    // without.
    const bool copies_vectors = target != Target::kCpu && dtype != DType::kF32;
    return {kLargestHeadSize, copies_vectors ? 8 : 1};
  }
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_ATTENTION_LIMITS_H_
