// SPDX-License-Identifier: Apache-2.0
// The mask of attention over a KV cache. Only a run knows the position of each sequence's first query.
#ifndef STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_
#define STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/base/types.h"
#include "plugins/core/mask/attention_mask.h"

namespace stof {

// The operand by which a device mask reads the first positions [B]. StofAttention's operand of this name has that role.
constexpr char kFirstPositions[] = "lengths";

struct CachedMask {
  // In absolute positions, with P of each sequence; it implies k <= q.
  MaskExpr expr;
  // The same with q counted from 0 and P read from the operand kFirstPositions, for kernels that have it on a device.
  std::shared_ptr<const AttentionMask> on_device;
  // The same for a first prompt, whose queries begin at position 0: it reads no run-time operand.
  std::shared_ptr<const AttentionMask> of_first_prompt;
  std::shared_ptr<const ColumnSource> columns;  // its key columns; nullptr: none
  // columns, where the other keys of a query are a range: those from q - q % column_block - column_window on. -1: the
  // mask is another one.
  int64_t column_window = -1;
  int64_t column_block = 1;
  // The mask of a step of one token, which may be a range where this one is none: S is 1, and its query is at P.
  // nullptr: the mask does not read S.
  std::shared_ptr<CachedMask> of_one_token;
  // ---- set by CompareHeads ----
  // As many neighbouring heads have the same mask: 1 or H / G.
  int64_t alike_heads = 1;
  // Of a step of one token on a device, for kernels that take the query heads of a group as its queries: h is the KV
  // head, and every row has the token's position. nullptr: heads differ, or the mask does not read h.
  std::shared_ptr<const AttentionMask> of_groups;
  // Whether the mask is `k <= q`, alone or with a window to the left.
  bool is_range = false;
  int64_t window_left = -1;  // is_range: the largest q - k that is allowed; -1: any
};

// Parses a mask and adds `k <= q` where it is no conjunct. Reading a run-time operand is an error, and so is reading T,
// which differs by sequence.
// window: of a sliding-window cache, which adds `q - k < window` likewise, since how many older keys the cache holds
// depends on the step; 0: none.
Status MakeCachedMask(const std::string& text, const Tables& tables, int64_t window, CachedMask* mask);

// Sets alike_heads and of_groups.
Status CompareHeads(int64_t heads, int64_t kv_heads, CachedMask* mask);

// Whether an expression uses positions only as distances q - k.
bool IsOfDistances(const MaskExpr& expr);

// A mask for one run on the CPU, evaluated tile by tile with the first position and length of each sequence.
class BoundCachedMask {
 public:
  // first[b]: the position of query 0; ends[b]: the number of keys. sizes: of the run, T and P aside.
  // alike_heads: DynamicMask::alike_heads. columns: where given, the key columns of expr, which is split into `split`;
  // they list tiles faster than the expression does.
  static Status Make(const MaskExpr& expr, const ExprSizes& sizes, const int32_t* first, const int32_t* ends,
                     std::unique_ptr<BoundCachedMask>* bound, int64_t alike_heads = 1,
                     const ColumnSplit* split = nullptr, const KeyColumns* columns = nullptr);
  const DynamicMask* view() const { return &view_; }
  Status status() const;
  // Holds what the expressions of Make belong to as long as this lives.
  void Keep(std::shared_ptr<const void> owner) { owner_ = std::move(owner); }

 private:
  BoundCachedMask(const ExprSizes& sizes, bool by_head, int64_t alike_heads, const KeyColumns* columns)
      : sizes_(sizes), columns_(columns), view_{&Tile, this, true, by_head, &Runs, alike_heads} {}
  static int Tile(const void* self, int64_t b, int64_t h, int64_t row0, int64_t key0, int m, int n, uint32_t* bits);
  static int64_t Runs(const void* self, int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                      KeyTileRun* runs);
  // The same by key columns.
  int64_t ListByColumns(int64_t b, int64_t h, int64_t row0, int m, int n, int64_t first, int64_t last,
                        KeyTileRun* runs) const;

  std::shared_ptr<const void> owner_;
  ExprSizes sizes_;
  const KeyColumns* columns_;                                // nullptr: none
  std::vector<int64_t> keys_;                                // [B], of each sequence
  std::vector<std::unique_ptr<BoundDynamicMask>> sequence_;  // likewise
  // Of ColumnSplit, likewise; nullptr of an empty part.
  std::vector<std::unique_ptr<BoundDynamicMask>> base_, base_and_rest_;
  DynamicMask view_;
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_CACHED_MASK_H_
