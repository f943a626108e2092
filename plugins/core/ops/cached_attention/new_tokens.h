// SPDX-License-Identifier: Apache-2.0
// What StofCachedAttention and StofPagedAttention check and bind alike of new tokens. kv_attention.h has the rest.
#ifndef STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_NEW_TOKENS_H_
#define STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_NEW_TOKENS_H_

#include <cstdint>

#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/ops/cached_attention/cached_attention.h"
#include "plugins/core/ops/named_inputs.h"

namespace stof {

// The index of each of these inputs.
struct TokenInputs {
  int query, key, value, cos, sin, query_norm, key_norm;
};

// Checks query, key and value, and sets their sizes, type, strides and addresses. Query is [B, S, columns], or without
// a batch axis [S, columns], and B is 1 then.
Status BindTokens(const NamedInputs& inputs, const TokenInputs& at, const CachedAttentionAttributes& attributes,
                  bool has_batch_axis, CacheAppendArgs* args);

// Checks the weights of RMS norms and, with do_rotary, the rotary tables, and binds them. Needs the sizes in *args.
Status BindTransforms(const NamedInputs& inputs, const TokenInputs& at, const CachedAttentionAttributes& attributes,
                      int64_t rotary_offset, CacheAppendArgs* args);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_NEW_TOKENS_H_
