// SPDX-License-Identifier: Apache-2.0
// Which rows of a KV cache a step reads and writes for one sequence. Shared by the kernel and the host's tests.
#ifndef STOF_CUDA_CACHED_ATTENTION_CACHE_ROWS_H_
#define STOF_CUDA_CACHED_ATTENTION_CACHE_ROWS_H_

#include <cstdint>

#include "cuda/common/host_device.h"

namespace stof {
namespace cuda {

// The sizes that all sequences share; fields as in CacheAppendArgs.
struct CacheShape {
  int64_t S = 0;
  int64_t past_capacity = 0;  // 0: no past
  int64_t capacity = 0;
  int64_t sliding_window = 0;
  int64_t most_keys = 0;  // 0: any number
  bool is_first_prompt = false;
};

// A step of one sequence. Past rows [kept_from, held) become rows [0, held - kept_from) of present. Token i becomes row
// first_row + i, unless that is outside of the cache. In staging, past rows are [0, held) and token i is row held + i.
struct CacheRows {
  int64_t past = 0;         // keys before this step, which is the position of token 0
  int64_t tokens = 0;       // new ones that are not padding
  int64_t held = 0;         // rows that the past cache holds
  int64_t kept_from = 0;    // the first of them that present keeps
  int64_t first_row = 0;    // of token 0 in present; negative where present does not keep it
  bool is_invalid = false;  // no row may be written; held and first_row keep reads in bounds
};

// How many of the first `keys` positions a cache no longer holds.
STOF_HD inline int64_t DroppedRows(const CacheShape& shape, int64_t keys) {
  if (shape.sliding_window == 0 || keys <= shape.capacity) return 0;
  const int64_t block = shape.capacity - shape.sliding_window + 1;  // positions that are dropped at once
  return (keys - shape.capacity + block - 1) / block * block;
}

// seqlen: valid keys after this step, minus 1. It may be any number.
STOF_HD inline CacheRows FindCacheRows(const CacheShape& shape, int32_t seqlen) {
  CacheRows rows;
  const int64_t total = int64_t{seqlen} + 1;
  rows.past = shape.is_first_prompt ? 0 : total - shape.S;
  rows.tokens = total - rows.past;
  const int64_t dropped = DroppedRows(shape, total), dropped_before = DroppedRows(shape, rows.past);
  rows.held = rows.past - dropped_before;
  rows.is_invalid = total < 1 || (shape.most_keys > 0 && total > shape.most_keys) || rows.past < 0 ||
                    rows.tokens > shape.S || rows.held > shape.past_capacity ||
                    (shape.sliding_window == 0 && rows.past + shape.S > shape.capacity);
  if (rows.is_invalid) {
    const int64_t most =
        shape.capacity - shape.S < shape.past_capacity ? shape.capacity - shape.S : shape.past_capacity;
    rows.past = rows.past > most ? most : rows.past;
    rows.past = rows.past < 0 ? 0 : rows.past;
    rows.tokens = shape.S;
    rows.held = rows.first_row = rows.past;
    return rows;
  }
  rows.first_row = rows.past - dropped;
  rows.kept_from = rows.first_row > 0 ? dropped - dropped_before : rows.held;
  return rows;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CACHED_ATTENTION_CACHE_ROWS_H_
