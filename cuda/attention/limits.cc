// SPDX-License-Identifier: Apache-2.0
// Limits of the CUDA kernels, and the workspace that a run needs. Plain C++ without a device, also in builds without
// kernels: an engine may be built on another machine than it runs on.
#include <algorithm>
#include <limits>
#include <string>

#include "cuda/attention/decode/api.h"
#include "cuda/attention/workspace_bounds.h"
#include "cuda/choose_pages/choose.h"
#include "cuda/mask/program/mask_program.h"
#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_limits.h"
#include "plugins/core/contract/cuda_backend.h"

namespace stof {

namespace {

Status CheckRows(const AttentionArgs& args) {
  const int64_t items = args.shape.B * args.shape.H * ((args.shape.S + cuda::kTileRows - 1) / cuda::kTileRows);
  const int64_t key_tiles = args.shape.B * args.shape.G * ((args.shape.T + cuda::kTileKeys - 1) / cuda::kTileKeys);
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 4;
  if (items > kMost || key_tiles > kMost || args.shape.S > AttentionLimits::kMostLength ||
      args.shape.T > AttentionLimits::kMostLength) {
    return Status::Error("batch " + std::to_string(args.shape.B) + ", " + std::to_string(args.shape.H) + " heads on " +
                         std::to_string(args.shape.G) + ", S " + std::to_string(args.shape.S) + " and T " +
                         std::to_string(args.shape.T) +
                         " are too many rows for one launch: expected at most 2^29 tiles of " +
                         std::to_string(cuda::kTileRows) + " queries and of " + std::to_string(cuda::kTileKeys) +
                         " keys; run with a smaller batch");
  }
  return Status();
}

constexpr int64_t kBlock = 64;  // bytes: what blocks of the workspace are rounded up to

// The families that many queries take. A problem has the workspace of one of them.
int64_t TiledBytes(const AttentionArgs& args, const AttentionMask& mask) {
  return RoundUp(std::max({cuda::BoundFp32Workspace(args, mask), cuda::BoundSm80Workspace(args, mask),
                           cuda::BoundSm90Workspace(args, mask)}),
                 kBlock);
}

// Gathered key columns: a longer copy of keys and values, and what kernels need more for it. Columns are gathered where
// they are at most half of the keys.
int64_t GatheredBytes(const AttentionArgs& args, const AttentionMask& mask) {
  AttentionArgs longer = args;
  longer.shape.T = args.shape.T + args.shape.T / 2 + KeyColumns::kAlign;
  const int64_t rows = args.shape.B * args.shape.G * longer.shape.T * SizeOf(args.shape.dtype);
  return RoundUp(rows * args.shape.D, kBlock) + RoundUp(rows * args.shape.Dv, kBlock) + TiledBytes(longer, mask);
}

// An upper bound of cuda::MaskBytes for all kernels, which grows with every size. In doubles: the product of an empty
// profile's sizes may overflow.
int64_t MaskBound(const cuda::MaskProgram& program, const AttentionArgs& args) {
  constexpr double kLargestTile = 256, kSmallestTile = 64;
  constexpr double kTileBytes = 32, kRowBytes = 64;  // beside the element masks
  constexpr double kFragments = 4.0 / 3;             // fragment order pads the keys of a tile
  const double tables =
      static_cast<double>(program.uses_b ? args.shape.B : 1) * static_cast<double>(program.uses_h ? args.shape.H : 1);
  const auto S = static_cast<double>(args.shape.S), T = static_cast<double>(args.shape.T);
  const bool few = args.shape.S <= cuda::kDecodeQueries && args.shape.dtype != DType::kF32;
  const double padded = few ? cuda::kDecodeTileRows : S + kLargestTile;
  const double rows = few ? 1 : S / kSmallestTile + 1, columns = T / kSmallestTile + 1;
  // Each term of q alone or k alone: all its values, and its extremes in every row or column of tiles.
  const auto sides = static_cast<double>(program.sides.size());
  const double numbers = sides * (8 * (std::max(S, T) + kLargestTile) + 16 * std::max(rows, columns));
  const double code =
      static_cast<double>(program.steps.size() * sizeof(cuda::NumberStep) + program.affines.size() * sizeof(Affine) +
                          program.bit_steps.size() * sizeof(cuda::BitStep));
  const double bytes = tables * (padded * (T + kLargestTile) * kFragments / 8 + rows * columns * kTileBytes +
                                 rows * kRowBytes + numbers) +
                       16.0 * program.pairs + code + (1 << 17);
  return static_cast<int64_t>(std::min(bytes, static_cast<double>(cuda::kMostMaskBytes) * 8));
}

// A mask that the run builds. Only type and shape of its run-time operands are known.
Status PlanMask(const AttentionArgs& args, const AttentionMask& mask, const ExprSizes& sizes, Tables operands,
                int64_t* bytes) {
  static char unread[64];
  for (auto& [role, tensor] : operands) {
    if (tensor.data == nullptr) tensor.data = unread;
  }
  cuda::MaskProgram program;
  STOF_RETURN_IF_ERROR(cuda::CompileMask(mask.parts.fixed, mask.parts.dynamic, sizes, operands, &program));
  const bool all_keys = AttendsAllKeys(args.mask.empty_rows);
  // Fully masked rows may be left to a second kernel, which has another tile size.
  *bytes = kBlock + RoundUp(MaskBound(program, args), kBlock) * (all_keys ? 2 : 1);
  return Status();
}

}  // namespace

Status CheckCudaAttention(const AttentionArgs& args) {
  if (args.relative_value.given()) return Status::Error("attention on CUDA takes no relative_value");
  if (KvType(args.shape) != args.shape.dtype) {
    const bool has_mean = AttendsAllKeys(args.mask.empty_rows);
    if (!IsQuantized(args.shape.kv_dtype) || has_mean) {
      return Status::Error("quantized keys and values are int8 or fp8, and attended by no fully masked row");
    }
  }
  const HeadSizes sizes = AttentionLimits::HeadSizesOf(Target::kCuda, args.shape.dtype);
  if (args.shape.dtype == DType::kF32) return CheckRows(args);
  if (sizes.largest == 0) {
    return Status::Error("the CUDA kernels take fp32, fp16 and bf16, found data type " + TypeText(args.shape.dtype));
  }
  if (!sizes.Has(args.shape.D) || !sizes.Has(args.shape.Dv)) {
    return Status::Error("the CUDA kernels take head sizes that are multiples of " + std::to_string(sizes.multiple_of) +
                         " up to " + std::to_string(sizes.largest) + ", found " + std::to_string(args.shape.D) +
                         " and " + std::to_string(args.shape.Dv));
  }
  // Quantized keys and values that the kernels do not read as they are become dense and aligned ones.
  const bool is_quantized = IsQuantized(args.shape.kv_dtype);
  for (const Strides* stride : {&args.query.stride, &args.key.stride, &args.value.stride, &args.output.stride}) {
    if (is_quantized && (stride == &args.key.stride || stride == &args.value.stride)) continue;
    if (stride->b % 8 != 0 || stride->h % 8 != 0 || stride->s % 8 != 0) {
      return Status::Error("rows of query, key, value and output must begin at multiples of 16 bytes");
    }
  }
  for (const void* base :
       {args.query.data, args.key.data, args.value.data, static_cast<const void*>(args.output.data)}) {
    if (is_quantized && (base == args.key.data || base == args.value.data)) continue;
    if (reinterpret_cast<uintptr_t>(base) % 16 != 0) {
      return Status::Error("query, key, value and output must be aligned to 16 bytes");
    }
  }
  return CheckRows(args);
}

bool IsLimitedToKeyRange(const AttentionArgs& args) {
  return args.mask.fixed.window() != nullptr && args.shape.T > 0 && args.shape.S <= cuda::kDecodeQueries &&
         args.mask.empty_rows <= EmptyRows::kNan && cuda::HasAlignedRows(args);
}

bool CanReadPages(const AttentionArgs& args) {
  return args.shape.T > 0 && args.shape.S <= cuda::kDecodeQueries && args.mask.empty_rows <= EmptyRows::kNan &&
         cuda::HasAlignedRows(args);
}

bool ChoosesPages(const AttentionArgs& args) {
  const PageChoice& choice = args.kv.choice;
  if (!choice.given() || !IsLimitedToKeyRange(args) || args.mask.fixed.window()->columns != nullptr) return false;
  // Where the list has every page anyway, other kernels are faster.
  const int64_t pages = cuda::CountPages(args.shape.T, choice.rows);
  return cuda::CanChoosePages(args.shape.dtype, args.shape.D) && args.shape.D == args.shape.Dv &&
         KvType(args.shape) == args.shape.dtype && args.key.stride.s == args.value.stride.s &&
         cuda::ListColumns(choice.chosen, pages) < pages;
}

Status PlanCudaAttention(const AttentionArgs& args, bool pad, const AttentionMask& mask, const ExprSizes& sizes,
                         const Tables& operands, size_t* workspace) {
  STOF_RETURN_IF_ERROR(CheckCudaAttention(args));
  // The packed padding and, where fully masked rows attend all keys, a flag for every 64 query rows: see
  // AttentionJob::PreparePadding.
  const int64_t tiles = pad ? (args.shape.T + cuda::kTileKeys - 1) / cuda::kTileKeys : 0;
  const bool all_keys = AttendsAllKeys(args.mask.empty_rows);
  const int64_t flags =
      all_keys ? args.shape.B * args.shape.H * ((args.shape.S + cuda::kRowsPerFlag - 1) / cuda::kRowsPerFlag) : 0;
  const int64_t bytes = args.shape.B * tiles * cuda::kTileKeys / 8 + 4 * flags;
  int64_t total = RoundUp(std::max<int64_t>(bytes, pad || all_keys ? 1 : 0), kBlock);
  // A profile's largest shapes stand for its smaller ones, which may be decode shapes.
  total += std::max(RoundUp(cuda::BoundDecodeWorkspace(args, mask), kBlock), TiledBytes(args, mask));
  if (mask.columns != nullptr) total += GatheredBytes(args, mask);
  if (!mask.parts.dynamic.empty() && args.shape.B > 0 && args.shape.H > 0 && args.shape.S > 0 && args.shape.T > 0) {
    int64_t made = 0;
    STOF_RETURN_IF_ERROR(PlanMask(args, mask, sizes, operands, &made));
    total += made;
  }
  *workspace = static_cast<size_t>(total);
  return Status();
}

}  // namespace stof
