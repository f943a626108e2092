// SPDX-License-Identifier: Apache-2.0
#ifndef STOF_CUDA_CACHED_ATTENTION_APPEND_H_
#define STOF_CUDA_CACHED_ATTENTION_APPEND_H_

#include "plugins/core/contract/cached_attention.h"

namespace stof {
namespace cuda {

// CachedAttentionBackend::append.
Status AppendToCache(const CacheAppendArgs& args, const RunContext& context);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CACHED_ATTENTION_APPEND_H_
