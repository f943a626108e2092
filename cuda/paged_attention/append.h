// SPDX-License-Identifier: Apache-2.0
// The members of PagedAttentionBackend.
#ifndef STOF_CUDA_PAGED_ATTENTION_APPEND_H_
#define STOF_CUDA_PAGED_ATTENTION_APPEND_H_

#include "plugins/core/contract/paged_attention.h"

namespace stof {
namespace cuda {

Status ReadCounts(const int32_t* from, int64_t count, int32_t* to, const RunContext& context);
Status AppendToPages(const PagedAppendArgs& args, const RunContext& context);
Status GatherPages(const PagedGatherArgs& args, const RunContext& context);
Status UnpadTokens(const PagedAppendArgs& args, const void* padded, void* output, const RunContext& context);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_PAGED_ATTENTION_APPEND_H_
