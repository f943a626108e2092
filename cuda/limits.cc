// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels take, and how much memory of a run they use. Plain C++ that needs no device, in builds without
// kernels too: an engine may be built where it is never run.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/attention.h"
#include "plugins/core/cuda_backend.h"

namespace stof {

Status CheckCudaAttention(const AttentionArgs& args) {
  if (args.dtype != DType::kF16 && args.dtype != DType::kBF16) {
    return Status::Error("the CUDA kernels take fp16 and bf16, found data type " +
                         std::to_string(static_cast<int>(args.dtype)));
  }
  // Rows are copied 16 bytes at a time.
  if (args.D % 8 != 0 || args.Dv % 8 != 0 || std::max(args.D, args.Dv) > 128) {
    return Status::Error("the CUDA kernels take head sizes that are multiples of 8 up to 128, found " +
                         std::to_string(args.D) + " and " + std::to_string(args.Dv));
  }
  for (const Strides* stride : {&args.query_stride, &args.key_stride, &args.value_stride, &args.output_stride}) {
    if (stride->b % 8 != 0 || stride->h % 8 != 0 || stride->s % 8 != 0) {
      return Status::Error("rows of query, key, value and output must begin at multiples of 16 bytes");
    }
  }
  for (const void* base : {args.query, args.key, args.value, static_cast<const void*>(args.output)}) {
    if (reinterpret_cast<uintptr_t>(base) % 16 != 0) {
      return Status::Error("query, key, value and output must be aligned to 16 bytes");
    }
  }
  const int64_t items = args.B * args.H * ((args.S + cuda::kTileRows - 1) / cuda::kTileRows);
  if (items > std::numeric_limits<int32_t>::max() || args.S > (1 << 22) || args.T > (1 << 22)) {
    return Status::Error("too many rows for one launch");
  }
  return Status();
}

Status PlanCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, size_t* workspace) {
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  if (!mask.parts.dynamic.empty()) {
    return Status::Error(
        "the mask reads vectors at run time other than padding, for which memory cannot be planned ahead; leave the "
        "site as it is (--skip)");
  }
  // Bits of the padding and, where rows without a key take all keys, a flag for every 64 rows: see cuda/backend.cc.
  const int64_t tiles = pad ? (args.T + cuda::kTileKeys - 1) / cuda::kTileKeys : 0;
  const bool all_keys = args.empty_rows == EmptyRows::kMean || args.empty_rows == EmptyRows::kAll;
  const int64_t pieces = all_keys ? args.B * args.H * ((args.S + cuda::kPiece - 1) / cuda::kPiece) : 0;
  const int64_t bytes = args.B * tiles * cuda::kTileKeys / 8 + 4 * pieces;
  *workspace = static_cast<size_t>((std::max<int64_t>(bytes, pad || all_keys ? 1 : 0) + 63) / 64 * 64);
  return Status();
}

}  // namespace stof
