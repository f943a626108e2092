// SPDX-License-Identifier: Apache-2.0
// The workspace of an attention with relative terms: expanded tables, and products by parts of positions. Plain C++
// without a device.
#ifndef STOF_CUDA_ATTENTION_RELATIVE_LAYOUT_H_
#define STOF_CUDA_ATTENTION_RELATIVE_LAYOUT_H_

#include <cstdint>

#include "plugins/core/base/status.h"
#include "plugins/core/contract/attention_args.h"

namespace stof {
namespace cuda {

constexpr int64_t kRelativeAlign = 64;  // bytes: of tables and products, and of the workspace
constexpr int kRelativeTerms = 3;       // relative_key, relative_key1, relative_query
constexpr const char* kRelativeTermNames[kRelativeTerms] = {"relative_key", "relative_key1", "relative_query"};
inline const RelativeTable& RelativeTermOf(const ScoreArgs& scores, int term) {
  return term == 2 ? scores.relative_query : scores.relative_key[term];
}
inline RelativeTable& RelativeTermOf(ScoreArgs* scores, int term) {
  return term == 2 ? scores->relative_query : scores->relative_key[term];
}
// Products of queries or keys and all rows that pairs can name exist for so many rows: a grid of so many cells a side
// has twice as many.
constexpr int64_t kMostPartRows = 4096;

// One term in the workspace. Offsets in bytes.
struct RelativeTermLayout {
  bool is_given = false;
  bool is_band = false;  // the row is a function of the distance of key and query; else of parts of positions
  int heads = 1;         // of the table
  int pairs = 0;         // pairs of k-steps
  int64_t expanded = 0;  // rows of the expanded table
  int64_t first = 0;     // expanded row i is row first + i of RelativeRows::row
  bool has_row_bias = false;
  int64_t rows = 0, row_bias = 0, factor = 0, products = 0;
  int64_t row_stride_h = 0;       // in bytes; 0: all heads share one table
  int64_t row_bias_stride_h = 0;  // of row bias and factor, in elements
};

struct RelativeLayout {
  RelativeTermLayout terms[kRelativeTerms];
  int64_t bytes = 0;
};

// head_size: elements of a head in the kernel's tiles, a multiple of 32. An error where parts of positions name too
// many rows.
Status PlanRelative(const AttentionArgs& args, int head_size, RelativeLayout* layout);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_RELATIVE_LAYOUT_H_
