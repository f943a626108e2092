// SPDX-License-Identifier: Apache-2.0
// Relative tables: a row for every pair of a query and a key, which depends on their positions alone. The product of a
// query or key with its row is a relative term of the score.
#ifndef STOF_PLUGINS_CORE_CONTRACT_RELATIVE_TABLE_H_
#define STOF_PLUGINS_CORE_CONTRACT_RELATIVE_TABLE_H_

#include <cstdint>

#include "plugins/core/base/inline.h"
#include "plugins/core/base/types.h"

namespace stof {

class MaskCacheSlot;  // plugins/core/mask/columns/cache_slot.h

// Which row of a table a pair names: that of query i and key j is row[key_part(j) - query_part(i) - low]. Positions of
// packed sequences are those of the padded problem.
struct RelativeRows {
  static constexpr int64_t kMargin =
      32;  // entries in front of `row` and behind it, which repeat the first and the last

  const int32_t* key_part = nullptr;    // [T + kMargin]; nullptr: j
  const int32_t* query_part = nullptr;  // [S]; nullptr: query_position + i
  const int32_t* row = nullptr;         // [count], rows of the table
  int64_t low = 0, count = 0;           // the differences are [low, low + count)
  int64_t query_position = 0;           // of query 0
  int32_t first_row = 0, last_row = 0;  // the least and the largest of `row`
  // Rows that fall with the difference are counted from the last row of the table: entry r names row rows - 1 - r.
  bool is_reversed = false;
  bool is_stepwise = false;  // neighbours of `row` differ by 0 or 1
  bool is_linear = false;    // they differ by 1
  // Devices: where a copy of the arrays is kept, which lives as long as they do. nullptr: none can be made.
  const MaskCacheSlot* on_device = nullptr;

  // Whether neighbouring keys name the same row or neighbouring ones.
  STOF_ALWAYS_INLINE bool IsStepwiseByKey() const { return is_stepwise && key_part == nullptr; }
  STOF_ALWAYS_INLINE int64_t KeyPart(int64_t j) const { return key_part == nullptr ? j : key_part[j]; }
  STOF_ALWAYS_INLINE int64_t QueryPart(int64_t i) const {
    return query_part == nullptr ? query_position + i : query_part[i];
  }
};

// [heads, rows, columns], dense. With one column more than its vectors have elements, the last one is the row bias,
// which is added to each dot product.
struct RelativeTable {
  const void* data = nullptr;  // nullptr: none
  DType dtype = DType::kUndefined;
  int64_t rows = 0, columns = 0;
  int64_t stride_h = 0;  // in elements; 0: all heads share one table
  RelativeRows index;
  STOF_ALWAYS_INLINE bool given() const { return data != nullptr; }
};

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_RELATIVE_TABLE_H_
