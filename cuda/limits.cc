// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels take, and how much memory of a run they use. Plain C++ that needs no device, in builds without
// kernels too: an engine may be built where it is never run.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/attention_decode.h"
#include "plugins/core/cuda_backend.h"

namespace stof {

namespace {

Status CheckRows(const AttentionArgs& args) {
  const int64_t items = args.B * args.H * ((args.S + cuda::kTileRows - 1) / cuda::kTileRows);
  const int64_t key_tiles = args.B * args.G * ((args.T + cuda::kTileKeys - 1) / cuda::kTileKeys);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 4;
  if (items > kMost || key_tiles > kMost || args.S > (1 << 22) || args.T > (1 << 22)) {
    return Status::Error("batch " + std::to_string(args.B) + ", " + std::to_string(args.H) + " heads on " +
                         std::to_string(args.G) + ", S " + std::to_string(args.S) + " and T " + std::to_string(args.T) +
                         " are too many rows for one launch: expected at most 2^29 tiles of " +
                         std::to_string(cuda::kTileRows) + " queries and of " + std::to_string(cuda::kTileKeys) +
                         " keys; run with a smaller batch");
  }
  return Status();
}

int64_t Rounded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// What the kernels for few queries ask for: less where there is less, down to what one split needs.
int64_t DecodeBytes(const AttentionArgs& args) {
  constexpr int64_t kMost = int64_t{16} << 20;
  const int64_t rows = args.B * args.H * std::min<int64_t>(args.S, cuda::kDecodeQueries);
  const int64_t tiles = (args.T + cuda::kTileKeys - 1) / cuda::kTileKeys;
  const auto bytes = [&](int64_t splits) { return rows * splits * (4 * args.Dv + 8) + 4 * rows; };
  return std::max(bytes(1), std::min(bytes(std::min<int64_t>(tiles, cuda::kMostSplits)), kMost));
}

// The kernel for fp32 splits keys and values: cuda::Fp32WorkspaceBytes.
int64_t Fp32Bytes(const AttentionArgs& args) {
  const int64_t size = std::max(args.D, args.Dv);
  int64_t head = 256;
  for (const int64_t one : {192, 128, 96, 64, 32}) head = size <= one ? one : head;
  const int64_t tiles = args.B * args.G * ((args.T + cuda::kTileKeys - 1) / cuda::kTileKeys);
  return tiles * (2 * int64_t{4} * cuda::kTileKeys * head + 4 * cuda::kTileKeys + 4);
}

}  // namespace

Status CheckCudaAttention(const AttentionArgs& args) {
  if (args.dtype == DType::kF32) return CheckRows(args);
  if (args.dtype != DType::kF16 && args.dtype != DType::kBF16) {
    return Status::Error("the CUDA kernels take fp32, fp16 and bf16, found data type " +
                         std::to_string(static_cast<int>(args.dtype)));
  }
  // Rows are copied 16 bytes at a time.
  if (args.D % 8 != 0 || args.Dv % 8 != 0 || std::max(args.D, args.Dv) > 256) {
    return Status::Error("the CUDA kernels take head sizes that are multiples of 8 up to 256, found " +
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
  return CheckRows(args);
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
  int64_t total = Rounded(std::max<int64_t>(bytes, pad || all_keys ? 1 : 0));
  // A profile's largest shapes stand for its smaller ones, too: few queries are among them.
  total += std::max(Rounded(DecodeBytes(args)), args.dtype == DType::kF32 ? Rounded(Fp32Bytes(args)) : 0);
  *workspace = static_cast<size_t>(total);
  return Status();
}

}  // namespace stof
