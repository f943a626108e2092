// SPDX-License-Identifier: Apache-2.0
// Choose pages (Quest, Tang et al. 2024): a decode step attends the pages of a KV cache whose keys may have the largest
// scores. docs/reference/cached-attention.md has the definition.
#ifndef STOF_PLUGINS_CORE_CONTRACT_PAGE_CHOICE_H_
#define STOF_PLUGINS_CORE_CONTRACT_PAGE_CHOICE_H_

#include <cstdint>

#include "plugins/core/base/inline.h"

namespace stof {

// Page p of a KV head holds rows [p * rows, (p + 1) * rows) of its cache. Its key bounds are the minima of its keys
// along the head, [D], then the maxima, [D], of the caches' type; a NaN where a key has one. Those of pages behind the
// keys of a sequence are undefined, and are not read.
struct PageBounds {
  int64_t rows = 0;            // of a page: 16, 32, 64 or 128; 0: there are no key bounds
  const void* past = nullptr;  // [B, G, past_pages, 2, D], dense
  int64_t past_pages = 0;      // 0: they are not known
  // [B, G, pages, 2, D], dense; equal to past where the runtime gives one buffer, and then past_pages is equal.
  void* present = nullptr;
  int64_t pages = 0;  // that the rows of the caches take
  STOF_ALWAYS_INLINE bool given() const { return rows > 0; }
};

// How a step of at most kMaxStepTokens tokens may choose among the pages of each KV head. A kernel that attends
// all of them is right, too.
struct PageChoice {
  int64_t chosen = 0;  // k: pages chosen besides those always attended; 0: every page is attended
  int64_t rows = 0;    // of a page
  // PageBounds::present behind the append step: strides in elements between sequences, KV heads and pages; a page has
  // D minima, then D maxima.
  void* bounds = nullptr;
  int64_t stride_b = 0, stride_g = 0, stride_page = 0;
  // Devices: the append step has left out the key bounds of the pages that FirstComputedPage begins, and written no
  // others. Attention computes them.
  bool lacks_new_bounds = false;
  STOF_ALWAYS_INLINE constexpr bool given() const { return chosen > 0; }
};

constexpr int64_t kMaxStepTokens = 16;

// Pages [first, last) of a KV head.
struct PageSpan {
  int32_t first = 0, last = 0;
};

// The first page whose key bounds a step computes from the keys of the cache; those before it are taken from past. What
// lies behind first_row, the row of the first new token, may be stale: callers rewind. first_row is not negative.
STOF_ALWAYS_INLINE_HOST_DEVICE int64_t FirstComputedPage(const PageBounds& bounds, int64_t first_row) {
  return bounds.past_pages == 0 ? 0 : first_row / bounds.rows;
}

// Page 0 is always attended, and all from this one on: that of the first new row, and the one before it.
STOF_ALWAYS_INLINE_HOST_DEVICE int64_t FirstRecentPage(int64_t rows, int64_t first_row) {
  const int64_t page = first_row / rows;
  return page > 0 ? page - 1 : 0;
}

}  // namespace stof
#endif  // STOF_PLUGINS_CORE_CONTRACT_PAGE_CHOICE_H_
