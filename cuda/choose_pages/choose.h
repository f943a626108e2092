// SPDX-License-Identifier: Apache-2.0
// Choose pages (Quest, Tang et al. 2024): scores of the pages of a KV cache, and the list of those that a step attends.
// Plain C++.
#ifndef STOF_CUDA_CHOOSE_PAGES_CHOOSE_H_
#define STOF_CUDA_CHOOSE_PAGES_CHOOSE_H_

#include <algorithm>
#include <cstdint>

#include "cuda/choose_pages/page_range.h"
#include "plugins/core/base/types.h"

namespace stof {
namespace cuda {

// Parameters of the kernels that score and choose pages. Strides count elements; pointers are device addresses.
struct PageChoiceParams {
  int32_t B = 0, H = 0, G = 0, S = 0, T = 0, D = 0;
  DType dtype = DType::kF16;    // of queries, keys and key bounds: fp16 or bf16
  const void* query = nullptr;  // [B, H, S, D]
  const void* key = nullptr;    // [B, G, T, D]; nullptr: the key bounds of pages with new rows are there already
  Strides query_stride, key_stride;
  float scale = 1.0f;
  const int32_t* first_rows = nullptr;  // [B]
  const int32_t* is_invalid = nullptr;  // [B]: key bounds of such a sequence are not written; nullptr: of none
  // [B]: first_rows[b] is seqlens[b] + 1 - S where is_invalid[b] is 0, and the previous kernel of the stream writes
  // neither these nor key bounds of pages that end before the first row. nullptr: it may.
  const int32_t* seqlens = nullptr;
  int32_t window_left = 0;  // of MakePageRange
  // [B, G, pages, 2, D] by strides: of each page the minima of its keys, then the maxima.
  void* bounds = nullptr;
  int64_t bounds_stride_b = 0, bounds_stride_g = 0, bounds_stride_page = 0;
  int32_t shift = 0;   // a page has 2^shift rows
  int32_t pages = 0;   // that T rows take
  int32_t chosen = 0;  // k: pages to choose
  // ---- workspace ----
  uint32_t* scores = nullptr;  // [B, G, pages], in the order of SortableScore
  // ---- results ----
  int32_t* list = nullptr;      // [B, G, columns]: the pages that are attended, ascending
  int32_t columns = 0;          // ListColumns
  int32_t* left_out = nullptr;  // [B, G]: rows of the pages that are left out
  // Pairs of query rows and keys of allowed pages, and those of pages left out, are added here; nullptr: they are
  // not counted.
  unsigned long long* counts = nullptr;
};

// The pages that T keys take.
inline int64_t CountPages(int64_t T, int64_t rows) { return (T + rows - 1) / rows; }
// The logarithm of the rows of a page.
inline int32_t PageShift(int64_t rows) { return rows == 16 ? 4 : rows == 32 ? 5 : rows == 64 ? 6 : 7; }
// Entries of a list: the pages that a KV head may attend.
inline int64_t ListColumns(int64_t chosen, int64_t pages) { return std::min(chosen + kAlwaysAttended, pages); }

// Offsets in bytes of the workspace. heads: B * G.
struct ChooseWorkspace {
  constexpr ChooseWorkspace(int64_t heads, int64_t pages, int64_t columns)
      : list(4 * heads * pages), left_out(list + 4 * heads * columns), bytes(left_out + 4 * heads) {}
  int64_t scores = 0;
  int64_t list;
  int64_t left_out;
  int64_t bytes;
};

// Whether the kernels below take heads of this size.
inline bool CanChoosePages(DType dtype, int64_t D) {
  return (dtype == DType::kF16 || dtype == DType::kBF16) && (D == 64 || D == 128);
}

// Queue a kernel on the stream, a cudaStream_t. They give a CUDA error code, 0 for none.
// Scores the candidates of each KV head. Where `key` is given, it also computes the key bounds of pages with new rows.
int LaunchPageScores(const PageChoiceParams& params, void* stream);
// Writes list and left_out. Runs behind LaunchPageScores.
int LaunchPageChoice(const PageChoiceParams& params, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_CHOOSE_PAGES_CHOOSE_H_
