// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/relative/layout.h"

#include <string>

#include "cuda/attention/relative/band.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {
Status PlanRelative(const AttentionArgs& args, int head_size, RelativeLayout* layout) {
  *layout = RelativeLayout();
  const AttentionShape& shape = args.shape;
  const auto take = [layout](int64_t bytes) {
    const int64_t at = layout->bytes;
    layout->bytes += RoundUp(bytes, kRelativeAlign);
    return at;
  };
  for (int i = 0; i < kRelativeTerms; ++i) {
    const RelativeTable& table = RelativeTermOf(args.scores, i);
    if (!table.given()) continue;
    const RelativeRows& index = table.index;
    RelativeTermLayout& term = layout->terms[i];
    term.is_given = true;
    term.is_band = index.key_part == nullptr && index.query_part == nullptr;
    term.heads = static_cast<int>(table.stride_h == 0 ? 1 : shape.H);
    term.pairs = head_size / 32;
    const int S = static_cast<int>(shape.S), T = static_cast<int>(shape.T);
    if (term.is_band) {
      term.expanded = ExpandedRows(S, T);
      term.first = -PaddedQueries(S) - index.query_position - index.low;
    } else {
      if (index.count > kMostPartRows) {
        return Status::Error(std::string(kRelativeTermNames[i]) + " is a function of parts of positions with " +
                             std::to_string(index.count) + " differences, expected at most " +
                             std::to_string(kMostPartRows) + " on CUDA: run the model on the CPU provider");
      }
      term.expanded = RoundUp(index.count, int64_t{32});
    }
    // In fp32, rows are split into high and low parts with a factor, and multiplied by parts of positions as they are.
    const bool is_fp32 = shape.dtype == DType::kF32;
    const int64_t row_bytes = term.expanded * term.pairs * 32 * SizeOf(shape.dtype);
    if (term.heads > 1) term.row_stride_h = row_bytes, term.row_bias_stride_h = term.expanded;
    if (term.is_band || !is_fp32) {
      term.rows = take(term.heads * row_bytes);
      term.has_row_bias = is_fp32 || !term.is_band || table.columns > shape.D;
      if (term.has_row_bias) term.row_bias = take(term.heads * term.expanded * 4);
    }
    if (term.is_band && is_fp32) term.factor = take(term.heads * term.expanded * 4);
    if (!term.is_band) term.products = take(shape.B * shape.H * (i == 2 ? shape.T : shape.S) * term.expanded * 4);
  }
  return Status();
}

}  // namespace cuda
}  // namespace stof
