// SPDX-License-Identifier: Apache-2.0
// The mask of StofCachedAttention in one run, with its key columns (plugins/core/mask/columns/key_columns.h).
#ifndef STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_COLUMNS_H_
#define STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_COLUMNS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "plugins/core/contract/attention.h"
#include "plugins/core/contract/cached_attention.h"
#include "plugins/core/contract/op.h"
#include "plugins/core/mask/cached_mask.h"

namespace stof {

// Binds the mask of a run on the CPU: sets attention->elements, and key_ends to *ends. ends: [B], the numbers of keys.
// Where gathering the key columns pays, the key axis of attention and *ends begin with them.
Status BindMaskOnCpu(const CachedMask& mask, const CacheAppendArgs& append, AttentionArgs* attention,
                     std::vector<int32_t>* ends, std::unique_ptr<BoundCachedMask>* bound);

// Has attention on a device read a key range and the mask's key columns, where that suits the step. The columns live as
// long as *columns.
Status UseKeyColumnsOnDevice(const CachedMask& mask, const CacheAppendArgs& append, const AttentionBackend& backend,
                             const RunContext& context, AttentionArgs* attention,
                             std::shared_ptr<const ColumnSource::Gathered>* columns);

// Where the heads of a group have one mask that reads h, a step of one token takes them as queries of their KV head, so
// that keys are read once for all of them. False, and nothing changes, in other cases.
bool PackGroups(const CachedMask& mask, AttentionArgs* attention);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_COLUMNS_H_
