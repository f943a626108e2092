// SPDX-License-Identifier: Apache-2.0
// Two copies around attention over a paged cache: pages of a sequence into contiguous keys and values, and rows of a
// padded batch to the tokens that they belong to.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/status.h"
#include "cuda/packed_sequences/copy_units.cuh"
#include "cuda/paged_attention/append.h"
#include "cuda/paged_attention/batch_check.cuh"
#include "cuda/paged_attention/token_rows.h"
#include "plugins/core/contract/op.h"

namespace stof {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsPerCta = 16;  // cache rows of all heads; a page holds 16 or more, so they lie on one

// ---- gather ----
struct GatherParams {
  PagedGatherArgs args;
  int64_t row_chunks = 0;  // of a sequence
  uint32_t pieces = 0;     // of a head
};

// A CTA copies 16 rows of all heads of a sequence, of keys or of values. Unit: what a thread moves at once.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) GatherKernel(const __grid_constant__ GatherParams params) {
  WaitForPrevious();
  LetNextStart();
  const PagedGatherArgs& args = params.args;
  const int64_t chunk = blockIdx.x % params.row_chunks, head_block = blockIdx.x / params.row_chunks;
  const int64_t b = head_block / 2;
  const int kind = static_cast<int>(head_block % 2);
  const int64_t first = chunk * kRowsPerCta, end = args.key_ends[b];
  const int64_t begin = FirstPagedKey(args.window_left, args.first_rows[b]);
  // begin is a multiple of 16, so no chunk holds rows on both sides of it.
  const bool is_read = first >= begin && first < end;
  const int64_t page = is_read ? args.pages.table[b * args.pages.columns + (first >> args.pages.shift)] : -1;
  const bool is_legal = page >= 0 && page < args.pages.pages;
  const uint32_t G = static_cast<uint32_t>(args.G), row_pieces = G * params.pieces;
  const auto* const from =
      static_cast<const Unit*>(args.cache[kind]) +
      ((is_legal ? page << args.pages.shift : 0) + (first & ((int64_t{1} << args.pages.shift) - 1))) * row_pieces;
  auto* const to = static_cast<Unit*>(args.to[kind]) + b * args.G * args.T * params.pieces;
  for (uint32_t at = threadIdx.x; at < kRowsPerCta * row_pieces; at += kThreads) {
    const uint32_t row = at / row_pieces, in_row = at % row_pieces, g = in_row / params.pieces;
    const int64_t k = first + row;
    if (k >= args.T) return;
    const Unit value = is_legal && k < end ? from[at] : Unit{};
    to[(g * args.T + k) * params.pieces + in_row % params.pieces] = value;
  }
}

template <typename Unit>
Status LaunchGather(GatherParams params, int64_t head_bytes, void* stream) {
  params.pieces = static_cast<uint32_t>(head_bytes / static_cast<int64_t>(sizeof(Unit)));
  const int64_t ctas = 2 * params.args.B * params.row_chunks;
  if (ctas > kMostCtas) return Status::Error("too many keys to gather at once: run with a smaller batch");
  constexpr auto kKernel = GatherKernel<Unit>;
  const int error = LaunchKernel<GatherParams, kKernel>(params, static_cast<unsigned>(ctas), kThreads, 0, stream,
                                                        CanStartEarly<GatherParams, kKernel>());
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that gathers pages");
}

// ---- unpad ----
struct UnpadParams {
  PagedShape shape;
  const int32_t* cumulative = nullptr;
  const int32_t* past = nullptr;
  const int32_t* is_invalid = nullptr;
  const void* padded = nullptr;
  void* output = nullptr;
  int64_t pieces = 0;  // of a token
};

// A CTA copies the row of one token. Unit: 16 bytes, or one element.
template <typename Unit>
__global__ void __launch_bounds__(kThreads) UnpadKernel(const __grid_constant__ UnpadParams params) {
  WaitForPrevious();
  LetNextStart();
  const bool is_legal = IsLegalBatch<kThreads>(params.shape, params.cumulative);
  const int64_t t = blockIdx.x;
  auto* const to = static_cast<Unit*>(params.output) + t * params.pieces;
  const Unit* from = nullptr;
  Unit fill = NanOf<Unit>();
  if (is_legal && t >= params.cumulative[params.shape.B]) {
    fill = Unit{};  // padding
  } else if (is_legal) {
    const int64_t b = FindSequence(params.cumulative, params.shape.B, t);
    const PagedSequence sequence =
        MakePagedSequence(params.shape, params.cumulative[b], params.cumulative[b + 1], params.past[b]);
    if (!sequence.is_invalid && params.is_invalid[b] == 0) {
      from = static_cast<const Unit*>(params.padded) +
             (b * params.shape.most_queries + t - sequence.begin) * params.pieces;
    }
  }
  for (int64_t i = threadIdx.x; i < params.pieces; i += kThreads) to[i] = from != nullptr ? from[i] : fill;
}

template <typename Unit>
Status LaunchUnpad(UnpadParams params, int64_t row_bytes, void* stream) {
  params.pieces = row_bytes / static_cast<int64_t>(sizeof(Unit));
  constexpr auto kKernel = UnpadKernel<Unit>;
  const int error = LaunchKernel<UnpadParams, kKernel>(params, static_cast<unsigned>(params.shape.N), kThreads, 0,
                                                       stream, CanStartEarly<UnpadParams, kKernel>());
  return ToStatus(static_cast<cudaError_t>(error), "launch of the kernel that unpads tokens");
}

}  // namespace

Status GatherPages(const PagedGatherArgs& args, const RunContext& context) {
  GatherParams params;
  params.args = args;
  params.row_chunks = (args.T + kRowsPerCta - 1) / kRowsPerCta;
  if (args.B == 0 || args.T == 0) return Status();
  const int64_t head_bytes = args.D * SizeOf(args.dtype);
  bool is_aligned = head_bytes % static_cast<int64_t>(sizeof(uint4)) == 0;
  for (int i = 0; i < 2; ++i) is_aligned = is_aligned && IsAligned(args.cache[i]) && IsAligned(args.to[i]);
  if (is_aligned) return LaunchGather<uint4>(params, head_bytes, context.stream);
  return SizeOf(args.dtype) == 4 ? LaunchGather<uint32_t>(params, head_bytes, context.stream)
                                 : LaunchGather<uint16_t>(params, head_bytes, context.stream);
}

Status UnpadTokens(const PagedAppendArgs& args, const void* padded, void* output, const RunContext& context) {
  const CacheAppendArgs& a = args.tokens;
  if (a.S == 0) return Status();
  UnpadParams params;
  params.shape = ShapeOf(args);
  params.cumulative = args.cumulative, params.past = args.past, params.is_invalid = args.is_invalid;
  params.padded = padded, params.output = output;
  const int64_t row_bytes = a.H * a.D * SizeOf(a.dtype);
  const bool is_aligned =
      row_bytes % static_cast<int64_t>(sizeof(uint4)) == 0 && IsAligned(padded) && IsAligned(output);
  if (is_aligned) return LaunchUnpad<uint4>(params, row_bytes, context.stream);
  return SizeOf(a.dtype) == 4 ? LaunchUnpad<uint32_t>(params, row_bytes, context.stream)
                              : LaunchUnpad<uint16_t>(params, row_bytes, context.stream);
}

}  // namespace cuda
}  // namespace stof
