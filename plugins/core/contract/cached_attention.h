// SPDX-License-Identifier: Apache-2.0
// Attention over a KV cache: the step in front of attention, which rotates queries and keys and appends to the cache.
#ifndef STOF_PLUGINS_CORE_CONTRACT_CACHED_ATTENTION_H_
#define STOF_PLUGINS_CORE_CONTRACT_CACHED_ATTENTION_H_

#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/contract/head_transform.h"
#include "plugins/core/contract/kv_scale.h"
#include "plugins/core/contract/page_choice.h"

namespace stof {

struct RunContext;  // plugins/core/contract/op.h

// The new tokens of B sequences, and the caches that they are appended to. All tensors have type dtype, but for the
// caches and staging: these have cache_dtype. On a device all pointers are device addresses. Strides count elements;
// the D elements of a head are contiguous.
struct CacheAppendArgs {
  int64_t B = 0, H = 0, G = 0, S = 0, D = 0;
  DType dtype = DType::kF32;
  // One of kQuantizedTypes: keys (behind norm and rotary embedding) and values are rounded to dtype, then quantized by
  // these scales. kUndefined: dtype.
  DType cache_dtype = DType::kUndefined;
  KvScale key_scale, value_scale;
  const void* query = nullptr;  // [B, H, S, D] by strides
  const void* key = nullptr;    // [B, G, S, D]
  const void* value = nullptr;  // [B, G, S, D]
  Strides query_stride, key_stride, value_stride;
  const void* past_key = nullptr;  // [B, G, past_capacity, D], dense; nullptr: no past
  const void* past_value = nullptr;
  int64_t past_capacity = 0;
  // [B, G, capacity, D], dense; equal to past_key where the runtime gives one buffer, and then past_capacity is equal.
  void* present_key = nullptr;
  void* present_value = nullptr;
  int64_t capacity = 0;
  const int32_t* seqlens = nullptr;  // [B], valid keys after this step, minus 1
  bool is_first_prompt = false;      // no sequence has a past: all new tokens begin at 0
  // The window of a sliding-window cache; 0: the cache holds all positions.
  int64_t sliding_window = 0;
  // [B, G, staging_capacity, D], dense: all rows of past and new tokens, which attention reads in place of present. For
  // a step of a sliding-window cache that drops rows which its own queries attend. nullptr: none.
  void* staging_key = nullptr;
  void* staging_value = nullptr;
  int64_t staging_capacity = 0;
  // Devices alone: the most keys of a sequence after this step; longer sequences are illegal. 0: any length.
  int64_t most_keys = 0;
  // Devices alone: value rows behind the new ones become zeros, below this row and within a KV tile. For attention that
  // multiplies values of masked keys by zero (not IsLimitedToKeyRange, contract/attention.h). 0: none.
  int64_t clear_end = 0;
  // Of the keys of present, which the append step updates behind them. They go with no quantized and no sliding-window
  // cache. Where seqlens is illegal, key bounds of the sequence are undefined.
  PageBounds page_bounds;
  HeadTransformArgs transform;  // of queries and of new keys, before they are appended
  // ---- results ----
  // [B, H, S, D], dense: transformed queries; nullptr: there is no transform.
  void* rotated_query = nullptr;
  // [B]: the row of the first new token of each sequence, in staging where given, else in present. It is the row after
  // a sliding-window cache has moved its rows; negative where present does not keep that token. On a device: where
  // seqlens is illegal, a row that keeps all accesses in bounds.
  int32_t* first_row = nullptr;
  // [B], devices alone: where the keys of each sequence end in the rows that first_row counts; padding of a first
  // prompt lies behind. Where seqlens is illegal, a row that keeps all accesses in bounds. nullptr: not asked for.
  int32_t* key_ends = nullptr;
  // [B], devices alone: 1 where seqlens or a position is illegal: the outputs of that sequence must be NaN.
  int32_t* is_invalid = nullptr;
};

// The element type of the caches.
STOF_ALWAYS_INLINE DType CacheType(const CacheAppendArgs& args) {
  return args.cache_dtype == DType::kUndefined ? args.dtype : args.cache_dtype;
}

// ---- CPU ----
// The staging_capacity that a step needs; 0: present keeps all rows that its queries attend. Reads sizes, seqlens,
// is_first_prompt and sliding_window; sequences with illegal seqlens are left out.
int64_t CpuCacheStagingRows(const CacheAppendArgs& args);
// Fills first_row alone, as CpuAppendToCache does. Of sequences with illegal seqlens it stays as it is.
void CpuFindFirstRows(const CacheAppendArgs& args);
// Checks seqlens and positions, and fills the caches, rotated_query, first_row and page_bounds. An error names the
// input and value.
Status CpuAppendToCache(const CacheAppendArgs& args, const Parallel& parallel);

// ---- CUDA ----
struct CachedAttentionBackend {
  // Queues kernels on context.stream that do what CpuAppendToCache does: one, or two with page_bounds.
  Status (*append)(const CacheAppendArgs& args, const RunContext& context) = nullptr;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_CACHED_ATTENTION_H_
