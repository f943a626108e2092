// SPDX-License-Identifier: Apache-2.0
// Kernels that prepare tables of relative positions for an attention kernel. Plain C++. Launchers give a CUDA error
// code, 0 for none; stream is a cudaStream_t.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_EXPAND_H_
#define STOF_CUDA_ATTENTION_RELATIVE_EXPAND_H_

#include <cstdint>

#include "plugins/core/base/types.h"

namespace stof {
namespace cuda {

// Expands a table: row i of the result is row[clamp(first + i, 0, count - 1)] of the table, in the order of band.h.
struct ExpandParams {
  const void* table = nullptr;  // [heads, rows, columns]
  int32_t is_float = 0;         // else it has the type of query
  int32_t heads = 0, rows = 0, columns = 0;
  int64_t stride_h = 0;
  int32_t D = 0;  // elements of a row in products; the row bias behind them is added
  const int32_t* row = nullptr;
  int64_t first = 0, count = 0;
  int32_t is_reversed = 0;      // rows are counted from the last one
  int32_t pairs = 0;            // pairs of k-steps: elements from D on are 0
  int64_t expanded = 0;         // rows of the result, a multiple of 8
  void* to = nullptr;           // [heads, expanded / 8, pairs, 32, 8]
  int32_t is_left_operand = 0;  // of products of keys (band.h); not in fp32
  float* row_bias = nullptr;    // [heads, expanded]: row bias, or 0; nullptr: not written, not in fp32
  float* factor = nullptr;      // the same, fp32
};
constexpr int kMostExpanded = 3;
// `count` tables, at most kMostExpanded, in fp16 or bf16.
int LaunchExpand(const ExpandParams* tables, int count, DType dtype, void* stream);
// fp32: rows become pairs of fp16 values, [heads, expanded / 8, pairs, high and low, 32, 8], times a factor.
int LaunchExpandFp32(const ExpandParams& params, void* stream);

// The products of all queries or keys and all expanded rows.
struct PartProductParams {
  const void* x = nullptr;  // [B, heads, N, D]
  Strides stride;
  int32_t B = 0, H = 0, group = 1;  // query heads of a head of x
  int32_t N = 0, D = 0;
  const void* rows = nullptr;  // [H or 1, columns / 8, pairs, 32, 8]
  const float* row_bias = nullptr;
  int64_t row_stride_h = 0;        // in bytes
  int64_t row_bias_stride_h = 0;   // in elements
  int32_t pairs = 0, columns = 0;  // a multiple of 32
  float* products = nullptr;       // [B, H, N, columns]
};
int LaunchPartProducts(const PartProductParams& params, DType dtype, void* stream);
// fp32: by the rows of a table as they are. Of p, rows and row_bias are not read; table: `to` and what is behind is not
// read.
int LaunchPartProductsFp32(const PartProductParams& params, const ExpandParams& table, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_EXPAND_H_
