// SPDX-License-Identifier: Apache-2.0
// StofCachedAttention: docs/reference/cached-attention.md is its contract.
#ifndef STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CACHED_ATTENTION_H_
#define STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CACHED_ATTENTION_H_

#include <cstdint>
#include <string>

#include "plugins/core/contract/attention_args.h"
#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/contract/op.h"

namespace stof {

// The inputs by index: those of GroupQueryAttention, the tables of the mask, and the key bounds of pages.
namespace cached_input {
constexpr int kQuery = 0, kKey = 1, kValue = 2, kPastKey = 3, kPastValue = 4, kSeqlens = 5, kTotal = 6, kCos = 7,
              kSin = 8, kPositions = 9, kBias = 10, kSink = 11, kKeyScale = 12, kValueScale = 13, kQueryNorm = 14,
              kKeyNorm = 15, kQuerySeqlens = 16, kTables = 17;
constexpr int kMostTables = 4;
constexpr int kPageBounds = kTables + kMostTables;
constexpr int kCount = kPageBounds + 1;
constexpr const char* kNames[kCount] = {"query",
                                        "key",
                                        "value",
                                        "past_key",
                                        "past_value",
                                        "seqlens_k",
                                        "total_sequence_length",
                                        "cos_cache",
                                        "sin_cache",
                                        "position_ids",
                                        "attention_bias",
                                        "head_sink",
                                        "k_scale",
                                        "v_scale",
                                        "q_norm_weight",
                                        "k_norm_weight",
                                        "query_seqlens",
                                        "table0",
                                        "table1",
                                        "table2",
                                        "table3",
                                        "past_page_bounds"};
}  // namespace cached_input

struct CachedAttentionAttributes {
  std::string mask;
  float scale = 0.0f;  // 0: 1 / sqrt(D)
  float softcap = 0.0f;
  float skip_threshold = 0.0f;
  float block_threshold = 0.0f;
  bool allow_bf16 = false;
  AttentionPrecision precision = AttentionPrecision::kFull;
  int64_t num_heads = 0;
  int64_t kv_num_heads = 0;
  bool do_rotary = false;
  bool is_interleaved = false;
  float epsilon = 1e-6f;
  int64_t sliding_window = 0;  // of a sliding-window cache; 0: the cache holds all positions
  int64_t chosen_pages = 0;    // of each KV head; 0: all keys are attended, and there are no key bounds
  int64_t page_rows = 64;
  std::string kernel;
};
Status ParseCachedAttention(const AttributeReader& attributes, CachedAttentionAttributes* parsed);

// The tensors of a cache before a step and after it, for messages: that of keys, then that of values.
struct CacheNames {
  const char* past[2];
  const char* present[2];
};
inline constexpr CacheNames kCachedNames = {{"past_key", "past_value"}, {"present_key", "present_value"}};
// Whether the memory of two tensors overlaps.
bool Overlap(const Tensor& first, const Tensor& second);
// Past and present may be one buffer, of keys and of values alike; any other overlap would lose rows. Each array is the
// tensor of keys, then that of values; past may be nullptr.
Status CheckCacheBuffers(const Tensor* past, const Tensor* present, const CacheNames& names);

// Checks k_scale and v_scale, nullptr where absent, against the caches' type and the sizes in *args, and binds them.
Status BindScales(const Tensor* key_scale, const Tensor* value_scale, CacheAppendArgs* args);

const OpDescription* CachedAttentionDescription();

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_CACHED_ATTENTION_H_
