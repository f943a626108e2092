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

// The mask of a run on the CPU, and the key axis that it is over.
struct HostMask {
  int64_t keys = 0;                     // T
  std::vector<int32_t> ends;            // [B], the number of keys of each sequence
  const KeyColumns* columns = nullptr;  // those in front of the keys, which the kernel gathers; nullptr: none
  std::unique_ptr<BoundCachedMask> mask;
};
// ends: [B], the numbers of keys. Where gathering the key columns pays, the key axis begins with them. can_gather: not
// beside an attention bias, nor where pages are chosen, which would then lie elsewhere.
Status BindMaskOnCpu(const CachedMask& mask, const CacheAppendArgs& append, bool can_gather, std::vector<int32_t> ends,
                     HostMask* bound);

// Has attention on a device read a causal window, where the mask is one, or one beside its key columns, where that
// suits the step. The columns live as long as *columns.
Status BindWindow(const CachedMask& mask, const CacheAppendArgs& append, const AttentionBackend& backend,
                  const RunContext& context, AttentionArgs* attention,
                  std::shared_ptr<const ColumnSource::Gathered>* columns);

// Where the heads of a group have one mask that reads h, a step of one token takes them as queries of their KV head, so
// that keys are read once for all of them. False, and nothing changes, in other cases.
bool PackGroups(const CachedMask& mask, AttentionArgs* attention);

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_OPS_CACHED_ATTENTION_COLUMNS_H_
