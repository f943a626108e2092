// SPDX-License-Identifier: Apache-2.0
// Key columns: keys that a mask allows wherever the query stands, as the verticals of vertical-slash attention or the
// strided blocks of S2. A mask with columns is `base and (rest or columns)`, whose part `columns` reads k and h alone.
#ifndef STOF_PLUGINS_CORE_MASK_COLUMNS_KEY_COLUMNS_H_
#define STOF_PLUGINS_CORE_MASK_COLUMNS_KEY_COLUMNS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plugins/core/base/status.h"
#include "plugins/core/host/fork_guard.h"
#include "plugins/core/mask/columns/cache_slot.h"
#include "plugins/core/mask/expr.h"

namespace stof {

struct AttentionMask;  // plugins/core/mask/attention_mask.h

// The parts of a mask with key columns. An empty base allows every pair, an empty rest none.
struct ColumnSplit {
  MaskExpr base, rest, columns;
  MaskExpr base_and_rest;  // empty: no pair
};

// Finds the parts of a mask: a top-level `or` of which some operands read k, h and tables alone. Conditions that all
// operands share, and those that stand beside the `or`, too, belong to the base. False: the mask has no columns.
bool SplitColumns(const MaskExpr& expr, ColumnSplit* split);

// Whether the mask is the same for all heads of a group, those from i * group on. True where it reads h only in
// `h // group`, or in other terms and table indices that have the same value for all heads of each group.
bool AreHeadsAlike(const MaskExpr& expr, int64_t heads, int64_t group);

// The key columns of each KV head, for the first `length` keys.
class KeyColumns {
 public:
  static constexpr int64_t kTile = 64;  // keys of a word
  // Packed columns are padded to a multiple of this many, a multiple of every key tile: the tiles behind stay aligned.
  static constexpr int64_t kAlign = 768;

  // columns: ColumnSplit::columns, the same for all heads of a group of `heads / kv_heads`.
  static Status Make(const MaskExpr& columns, int64_t heads, int64_t kv_heads, int64_t length,
                     std::shared_ptr<const KeyColumns>* made);

  // 1 where all KV heads have the same columns.
  int64_t lists() const { return static_cast<int64_t>(keys_.size()); }
  int64_t length() const { return length_; }
  int64_t ListOf(int64_t g) const { return keys_.size() == 1 ? 0 : g; }
  // The columns of a list, ascending.
  const std::vector<int32_t>& keys(int64_t list) const { return keys_[static_cast<size_t>(list)]; }
  // Bit i of word t: key 64 t + i is a column.
  const uint64_t* words(int64_t list) const { return words_.data() + list * word_count_; }
  int64_t word_count() const { return word_count_; }
  // The most columns of a list, and those padded to kAlign.
  int64_t most() const { return most_; }
  int64_t packed() const;
  // Columns of all lists together, and keys of the tiles of 64 that hold one.
  int64_t total() const { return total_; }
  int64_t tile_keys() const { return tile_keys_; }
  // Whether gathering single columns reads clearly less than the tiles of 64 keys that hold one.
  bool are_sparse() const { return are_sparse_; }
  // For cuda/mask/device_columns.h.
  const MaskCacheSlot& on_device() const { return on_device_; }

 private:
  std::vector<std::vector<int32_t>> keys_;
  std::vector<uint64_t> words_;
  int64_t length_ = 0, word_count_ = 0, most_ = 0, total_ = 0, tile_keys_ = 0;
  bool are_sparse_ = false;
  MaskCacheSlot on_device_;
};

// The mask over an axis of columns.packed() gathered columns and then all keys. Column i of head h allows what
// `base and not rest` does for its key; the keys behind allow `base and rest`. False: the expression would be too long.
// keys: the number of keys, in place of T; -1: the mask does not read T.
bool MakeGatheredMask(const ColumnSplit& split, const KeyColumns& columns, int64_t group, int64_t keys, MaskExpr* mask);

// A mask's parts, and the columns and gathered mask that runs of equal sizes share. Several threads may ask.
class ColumnSource {
 public:
  explicit ColumnSource(const MaskExpr& expr) { has_columns_ = SplitColumns(expr, &split_); }
  bool has_columns() const { return has_columns_; }
  const ColumnSplit& split() const { return split_; }

  struct Gathered {
    int64_t heads = 0, kv_heads = 0, length = 0, keys = 0;
    std::shared_ptr<const KeyColumns> columns;  // nullptr: heads of a group differ, or there are too many
    std::shared_ptr<const AttentionMask> mask;  // MakeGatheredMask; nullptr unless columns are sparse
  };
  // length: the columns are those of so many keys. keys: as in MakeGatheredMask. Never nullptr.
  std::shared_ptr<const Gathered> Get(int64_t heads, int64_t kv_heads, int64_t length, int64_t keys) const;

 private:
  bool has_columns_ = false;
  ColumnSplit split_;
  static constexpr size_t kMostKnown = 4;                                 // sizes
  mutable ForkSafe<std::vector<std::shared_ptr<const Gathered>>> known_;  // most recent first
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_MASK_COLUMNS_KEY_COLUMNS_H_
