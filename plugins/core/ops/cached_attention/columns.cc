// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/columns.h"

#include <algorithm>

#include "plugins/core/base/integers.h"

namespace stof {
namespace {

// The number of keys for which key columns are made. Those of a cache that grows by a row a step stay for many steps,
// unless they read tables, which may end.
int64_t ColumnLength(const CachedMask& mask, const CacheAppendArgs& append, int64_t keys) {
  constexpr int64_t kUnit = 4096;
  const int64_t rows = std::max(append.capacity, keys);
  return mask.columns->split().columns.operands().empty() ? std::min(RoundUp(rows, kUnit), MaskExpr::kMaxSize) : rows;
}

}  // namespace

Status BindMaskOnCpu(const CachedMask& mask, const CacheAppendArgs& append, AttentionArgs* attention,
                     std::vector<int32_t>* ends, std::unique_ptr<BoundCachedMask>* bound) {
  std::shared_ptr<const ColumnSource::Gathered> gathered;
  const auto bind = [&](const MaskExpr& expr, const ColumnSplit* split, const KeyColumns* columns) {
    const ExprSizes sizes = {append.B, append.H, append.S, attention->T, 0};
    STOF_RETURN_IF_ERROR(
        BoundCachedMask::Make(expr, sizes, append.first_row, ends->data(), bound, mask.alike_heads, split, columns));
    (*bound)->Keep(gathered);
    attention->elements = (*bound)->view();
    attention->key_ends = ends->data();
    return Status();
  };
  if (mask.columns == nullptr) return bind(mask.expr, nullptr, nullptr);
  gathered = mask.columns->Get(append.H, append.G, ColumnLength(mask, append, attention->T), -1);
  const KeyColumns* columns = gathered->columns.get();
  if (gathered->mask != nullptr && attention->bias == nullptr) {
    const AttentionArgs plain = *attention;
    const auto packed = static_cast<int32_t>(columns->packed());
    for (int32_t& end : *ends) end += packed;
    attention->columns = columns;
    attention->T += packed;
    if (attention->T <= MaskExpr::kMaxSize && bind(gathered->mask->parts.fixed, nullptr, nullptr).ok()) {
      return Status();
    }
    for (int32_t& end : *ends) end -= packed;
    *attention = plain;
  }
  return bind(mask.expr, &mask.columns->split(), columns);
}

Status UseKeyColumnsOnDevice(const CachedMask& mask, const CacheAppendArgs& append, const AttentionBackend& backend,
                             const RunContext& context, AttentionArgs* attention,
                             std::shared_ptr<const ColumnSource::Gathered>* columns) {
  AttentionArgs ranged = *attention;
  ranged.first_rows = append.first_row;
  ranged.is_key_range = true;
  ranged.window_left = mask.column_window;
  ranged.window_block = mask.column_block;
  if (mask.column_window < 0 || append.is_first_prompt || ranged.bias != nullptr || append.B == 0 ||
      !IsLimitedToKeyRange(ranged)) {
    return Status();
  }
  *columns = mask.columns->Get(append.H, append.G, ColumnLength(mask, append, ranged.T), -1);
  ranged.range_columns = (*columns)->columns.get();
  if (ranged.range_columns == nullptr) return Status();
  bool is_ready = false;
  STOF_RETURN_IF_ERROR(backend.upload_columns(*ranged.range_columns, context, &is_ready));
  if (is_ready) *attention = ranged;
  return Status();
}

bool PackGroups(const CachedMask& mask, AttentionArgs* attention) {
  AttentionArgs& args = *attention;
  constexpr int64_t kMostHeads = 16;  // more are no few queries
  const int64_t group = args.H / args.G;
  if (mask.of_groups == nullptr || args.S != 1 || args.is_key_range || group > kMostHeads || args.sink != nullptr ||
      args.bias != nullptr) {
    return false;
  }
  for (Strides* stride : {&args.query_stride, &args.output_stride}) {
    stride->s = stride->h;
    stride->h *= group;
  }
  args.H = args.G;
  args.S = group;
  return true;
}

}  // namespace stof
