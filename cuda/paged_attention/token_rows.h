// SPDX-License-Identifier: Apache-2.0
// Which tokens a sequence of a packed batch has, and which rows of a paged cache it reads and writes. All arrays may
// hold any numbers: no result leads out of bounds. Shared by the kernels and the host's tests.
#ifndef STOF_CUDA_PAGED_ATTENTION_TOKEN_ROWS_H_
#define STOF_CUDA_PAGED_ATTENTION_TOKEN_ROWS_H_

#include <cstdint>

#include "cuda/common/host_device.h"
#include "plugins/core/contract/paged_attention.h"

namespace stof {
namespace cuda {

// The sizes that all sequences share.
struct PagedShape {
  int64_t B = 0, N = 0;  // sequences, tokens
  int64_t columns = 0, pages = 0;
  int shift = 0;
  int64_t most_queries = 0, most_keys = 0;  // of a sequence
  int64_t window_left = -1;
};

inline PagedShape ShapeOf(const PagedAppendArgs& args) {
  PagedShape shape;
  shape.B = args.B, shape.N = args.tokens.S;
  shape.columns = args.pages.columns, shape.pages = args.pages.pages, shape.shift = args.pages.shift;
  shape.most_queries = args.most_queries, shape.most_keys = args.most_keys;
  shape.window_left = args.window_left;
  return shape;
}

struct PagedSequence {
  int64_t begin = 0, tokens = 0;  // its tokens are [begin, begin + tokens)
  int64_t past = 0;               // keys before the step
  bool is_invalid = false;        // it has no token and no key then
};

// The sequence that token t belongs to, where cumulative[B + 1] rises and t lies below its last entry; else any one.
STOF_HD inline int64_t FindSequence(const int32_t* cumulative, int64_t B, int64_t t) {
  int64_t low = 0, high = B;  // cumulative[low] <= t
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (cumulative[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

STOF_HD inline PagedSequence MakePagedSequence(const PagedShape& shape, int32_t begin, int32_t end, int32_t past) {
  PagedSequence sequence;
  const int64_t tokens = int64_t{end} - begin, keys = past + tokens;
  sequence.is_invalid = begin < 0 || tokens < 0 || end > shape.N || past < 0 || tokens > shape.most_queries ||
                        keys > shape.columns << shape.shift || (tokens > 0 && keys > shape.most_keys);
  if (sequence.is_invalid) return sequence;
  sequence.begin = begin;
  sequence.tokens = tokens;
  sequence.past = past;
  return sequence;
}

// The first key that may be read: PagedAppendArgs::FirstKey.
STOF_HD inline int64_t FirstPagedKey(int64_t window_left, int64_t past) {
  const int64_t first = window_left < 0 ? 0 : past - window_left;
  return first <= 0 ? 0 : first / kMostTileKeys * kMostTileKeys;
}

// The row of the cache at a position below columns << shift; -1: its block lies outside of the cache.
STOF_HD inline int64_t RowOfPosition(const PagedShape& shape, const int32_t* table_row, int64_t position) {
  const int64_t column = position >> shape.shift, page = table_row[column];
  if (page < 0 || page >= shape.pages) return -1;
  return (page << shape.shift) + position - (column << shape.shift);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PAGED_ATTENTION_TOKEN_ROWS_H_
