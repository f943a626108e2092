// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/relative/terms.h"

#include "cuda/attention/relative/expand.h"
#include "cuda/common/status.h"

namespace stof {
namespace cuda {
namespace {

int32_t Narrow(int64_t size) { return static_cast<int32_t>(size); }

ExpandParams ExpandParamsOf(const AttentionArgs& args, const RelativeTable& table, const RelativeTermLayout& layout,
                            const int32_t* row, char* workspace) {
  ExpandParams p;
  p.table = table.data;
  p.is_float = table.dtype == DType::kF32 ? 1 : 0;
  p.heads = layout.heads, p.rows = Narrow(table.rows), p.columns = Narrow(table.columns);
  p.stride_h = table.stride_h;
  p.D = Narrow(args.shape.D);
  p.row = row;
  p.first = layout.first, p.count = table.index.count;
  p.is_reversed = table.index.is_reversed ? 1 : 0;
  p.pairs = layout.pairs, p.expanded = layout.expanded;
  p.to = workspace + layout.rows;
  p.row_bias = layout.has_row_bias ? reinterpret_cast<float*>(workspace + layout.row_bias) : nullptr;
  p.factor = reinterpret_cast<float*>(workspace + layout.factor);
  return p;
}

// Expands tables of bands, and in 16 bits all of them.
Status Expand(const RelativeLayout& layout, const ExpandParams (&tables)[kRelativeTerms], DType dtype, void* stream) {
  static_assert(kRelativeTerms <= kMostExpanded, "one launch expands all tables");
  ExpandParams wanted[kRelativeTerms];
  int count = 0, error = 0;
  for (int i = 0; i < kRelativeTerms; ++i) {
    const RelativeTermLayout& own = layout.terms[i];
    if (own.is_given && (own.is_band || dtype != DType::kF32)) wanted[count++] = tables[i];
  }
  if (dtype != DType::kF32) {
    error = LaunchExpand(wanted, count, dtype, stream);
  } else {
    for (int i = 0; i < count && error == 0; ++i) error = LaunchExpandFp32(wanted[i], stream);
  }
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that expands tables of relative positions");
}

// Of queries, or with of_keys of keys. In fp32 by the table, else by its expanded rows.
Status MultiplyParts(const AttentionArgs& args, const ExpandParams& table, const RelativeTermLayout& layout,
                     bool of_keys, char* workspace, void* stream) {
  const AttentionShape& shape = args.shape;
  const TensorView& x = of_keys ? args.key : args.query;
  PartProductParams p;
  p.x = x.data, p.stride = x.stride;
  p.B = Narrow(shape.B), p.H = Narrow(shape.H);
  p.group = of_keys ? Narrow(shape.H / shape.G) : 1;
  p.N = Narrow(of_keys ? shape.T : shape.S), p.D = Narrow(shape.D);
  p.rows = table.to, p.row_stride_h = layout.row_stride_h;
  p.row_bias = table.row_bias, p.row_bias_stride_h = layout.row_bias_stride_h;
  p.pairs = layout.pairs, p.columns = Narrow(layout.expanded);
  p.products = reinterpret_cast<float*>(workspace + layout.products);
  const int error = shape.dtype == DType::kF32 ? LaunchPartProductsFp32(p, table, stream)
                                               : LaunchPartProducts(p, shape.dtype, stream);
  return ToStatus(static_cast<cudaError_t>(error),
                  "launch of the kernel that multiplies by rows of relative positions");
}

}  // namespace

Status PrepareRelative(const AttentionArgs& args, const RelativeLayout& layout, const RelativeRowsOnDevice& rows,
                       void* workspace, void* stream, RelativeParams* params) {
  *params = RelativeParams();
  char* const base = static_cast<char*>(workspace);
  ExpandParams tables[kRelativeTerms];
  for (int i = 0; i < kRelativeTerms; ++i) {
    const RelativeTermLayout& own = layout.terms[i];
    if (!own.is_given) continue;
    const DeviceRowsEntry* const entry = rows.terms[i].get();
    tables[i] =
        ExpandParamsOf(args, RelativeTermOf(args.scores, i), own, entry == nullptr ? nullptr : entry->row(), base);
    tables[i].is_left_operand = own.is_band && i == 2 ? 1 : 0;
  }
  STOF_RETURN_IF_ERROR(Expand(layout, tables, args.shape.dtype, stream));
  for (int i = 0; i < kRelativeTerms; ++i) {
    const RelativeTermLayout& own = layout.terms[i];
    if (!own.is_given) continue;
    const RelativeTable& table = RelativeTermOf(args.scores, i);
    const DeviceRowsEntry* const entry = rows.terms[i].get();
    const ExpandParams& expand = tables[i];
    RelativeTerm* const term = i == 2 ? &params->query : &params->key[i];
    if (own.is_band) {
      term->band = {expand.to, expand.row_bias, expand.factor, own.row_stride_h, own.row_bias_stride_h};
      continue;
    }
    STOF_RETURN_IF_ERROR(MultiplyParts(args, expand, own, i == 2, base, stream));
    term->part.products = reinterpret_cast<const float*>(base + own.products);
    term->part.offset = Narrow(-table.index.low), term->part.columns = Narrow(own.expanded);
    if (entry == nullptr) continue;
    term->part.key_part = entry->key_part();
    // A part of a problem may begin at a later query.
    term->part.query_part = entry->query_part() + (table.index.query_position - entry->query_position());
  }
  const RelativeBias& bias = args.scores.relative_bias;
  params->factor = {bias.factor, bias.factor_stride_b, bias.factor_stride_h, bias.factor_dtype == DType::kF32 ? 1 : 0};
  return Status();
}

}  // namespace cuda
}  // namespace stof
