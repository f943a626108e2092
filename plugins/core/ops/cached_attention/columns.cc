// SPDX-License-Identifier: Apache-2.0
#include "plugins/core/ops/cached_attention/columns.h"

#include <algorithm>
#include <utility>

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

Status BindMaskOnCpu(const CachedMask& mask, const CacheAppendArgs& append, bool can_gather, std::vector<int32_t> ends,
                     HostMask* bound) {
  bound->keys = *std::max_element(ends.begin(), ends.end());
  bound->ends = std::move(ends);
  std::shared_ptr<const ColumnSource::Gathered> gathered;
  const auto bind = [&](const MaskExpr& expr, const ColumnSplit* split, const KeyColumns* columns) {
    const ExprSizes sizes = {append.B, append.H, append.S, bound->keys, 0};
    STOF_RETURN_IF_ERROR(BoundCachedMask::Make(expr, sizes, append.first_row, bound->ends.data(), &bound->mask,
                                               mask.alike_heads, split, columns));
    bound->mask->Keep(gathered);
    return Status();
  };
  if (mask.columns == nullptr) return bind(mask.expr, nullptr, nullptr);
  gathered = mask.columns->Get(append.H, append.G, ColumnLength(mask, append, bound->keys), -1);
  const KeyColumns* columns = gathered->columns.get();
  if (gathered->mask != nullptr && can_gather) {
    const auto packed = static_cast<int32_t>(columns->packed());
    const auto lengthen = [bound](int32_t by) {
      bound->keys += by;
      for (int32_t& end : bound->ends) end += by;
    };
    lengthen(packed);
    if (bound->keys <= MaskExpr::kMaxSize && bind(gathered->mask->parts.fixed, nullptr, nullptr).ok()) {
      bound->columns = columns;
      return Status();
    }
    lengthen(-packed);
  }
  return bind(mask.expr, &mask.columns->split(), columns);
}

Status BindWindow(const CachedMask& mask, const CacheAppendArgs& append, const AttentionBackend& backend,
                  const RunContext& context, AttentionArgs* attention,
                  std::shared_ptr<const ColumnSource::Gathered>* columns) {
  CausalWindow window;
  window.first_rows = append.first_row;
  if (mask.is_range) {
    window.window_left = mask.window_left;
    attention->mask.fixed = StaticMask::OfWindow(window);
    return Status();
  }
  window.window_left = mask.column_window;
  AttentionArgs windowed = *attention;
  windowed.mask.fixed = StaticMask::OfWindow(window);
  if (mask.column_window < 0 || append.is_first_prompt || windowed.scores.bias.data != nullptr || append.B == 0 ||
      !IsLimitedToKeyRange(windowed)) {
    return Status();
  }
  *columns = mask.columns->Get(append.H, append.G, ColumnLength(mask, append, windowed.shape.T), -1);
  window.columns = (*columns)->columns.get();
  window.window_block = mask.column_block;
  if (window.columns == nullptr) return Status();
  bool is_ready = false;
  STOF_RETURN_IF_ERROR(backend.upload_columns(*window.columns, context, &is_ready));
  if (is_ready) attention->mask.fixed = StaticMask::OfWindow(window);
  return Status();
}

bool PackGroups(const CachedMask& mask, AttentionArgs* attention) {
  AttentionArgs& args = *attention;
  constexpr int64_t kMostHeads = 16;  // more are no few queries
  AttentionShape& shape = args.shape;
  const int64_t group = shape.H / shape.G;
  if (mask.of_groups == nullptr || shape.S != 1 || args.mask.fixed.window() != nullptr || group > kMostHeads ||
      args.scores.sink.data != nullptr || args.scores.bias.data != nullptr) {
    return false;
  }
  for (Strides* stride : {&args.query.stride, &args.output.stride}) {
    stride->s = stride->h;
    stride->h *= group;
  }
  shape.H = shape.G;
  shape.S = group;
  return true;
}

}  // namespace stof
