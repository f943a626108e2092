// SPDX-License-Identifier: Apache-2.0
// The workspace of choose blocks on CUDA: patches of queries and keys, and the tile lists of the chosen blocks. Plain
// C++ without a device: PlanCudaAttention bounds it.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_LAYOUT_H_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_LAYOUT_H_

#include <algorithm>
#include <cstdint>

#include "plugins/core/base/integers.h"
#include "plugins/core/contract/attention_args.h"
#include "plugins/core/contract/chosen_blocks.h"

namespace stof {
namespace cuda {

// A call that needs more computes every block.
constexpr int64_t kMostChoosingBytes = int64_t{2} << 30;
// Key patches of a batch and head are padded to this: a tile of the estimates has so many, or a divisor.
constexpr int64_t kPatchTile = 128;

// Elements of a patch, zero-padded: a head size that the kernel has, or 0.
constexpr int64_t PatchSize(int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : head_size <= 256 ? 256 : 0;
}

// Sizes, and offsets in bytes. A unit is the query patches of one head and query block. Rows of patches are those of a
// batch and KV head: units in the order of query blocks, then heads of the group.
struct ChoosingLayout {
  // entries: key tiles of a tile row at most. partial: of these, with an element mask.
  ChoosingLayout(const AttentionShape& shape, int64_t entries, int64_t partial)
      : patch_size(PatchSize(shape.D)),
        row_blocks(CeilDiv(shape.S, kChosenRows)),
        key_blocks(CeilDiv(shape.T, kChosenKeys)),
        query_rows(shape.H / shape.G * row_blocks * (kChosenRows / kPatchQueries)),
        key_rows(RoundUp(key_blocks * (kChosenKeys / kPatchKeys), kPatchTile)),
        list_stride(entries + partial),
        tile_rows(shape.B * shape.H * row_blocks) {
    const auto put = [this](int64_t bytes) {
      const int64_t at = total;
      total += RoundUp(bytes, 128);
      return at;
    };
    const int64_t heads = shape.B * shape.G;
    query_patches = put(2 * heads * query_rows * patch_size);
    key_patches = put(2 * heads * key_rows * patch_size);
    exists = put(shape.B * key_rows);
    layout = put(4 * shape.B * shape.H);
    for (int64_t* at : {&row_ptr, &row_end, &full_begin, &order}) *at = put(4 * tile_rows);
    lists = put(4 * tile_rows * list_stride);
  }
  int64_t patch_size;              // elements
  int64_t row_blocks, key_blocks;  // of a head
  int64_t query_rows, key_rows;    // patches of a batch and KV head
  int64_t list_stride;             // words of a tile row's list: its key tiles, then the element masks of partial ones
  int64_t tile_rows;               // of all batches and heads
  int64_t query_patches = 0, key_patches = 0, exists = 0, layout = 0;
  int64_t row_ptr = 0, row_end = 0, full_begin = 0, order = 0, lists = 0;
  int64_t total = 0;
};

// At most what a call with these arguments, or smaller ones, needs; 0: it computes every block. has_mask: there may be
// partial tiles.
inline int64_t BoundChoosingBytes(const AttentionArgs& args, bool has_mask) {
  const AttentionShape& shape = args.shape;
  if (!ChoosesBlocks(args) || shape.dtype == DType::kF32 || PatchSize(shape.D) == 0 || shape.G <= 0) return 0;
  constexpr int64_t kFewestKeys = 64;  // of a tile
  const int64_t tiles = CeilDiv(shape.T, kFewestKeys);
  return std::min(ChoosingLayout(shape, tiles, has_mask ? tiles : 0).total, kMostChoosingBytes);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_LAYOUT_H_
