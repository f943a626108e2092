// SPDX-License-Identifier: Apache-2.0
// The workspace of choose blocks on CUDA: pooled queries and keys, and the tile lists of the chosen blocks. Plain
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
constexpr int64_t kMaxChoiceBytes = int64_t{2} << 30;
// Pooled keys of a batch and head are padded to this: a tile of the estimates has so many, or a divisor.
constexpr int64_t kPooledTile = 128;

// Elements of a pooled query or key, zero-padded: a head size that the kernel has, or 0.
constexpr int64_t PooledSize(int64_t head_size) {
  return head_size <= 64 ? 64 : head_size <= 128 ? 128 : head_size <= 256 ? 256 : 0;
}

// Sizes, and offsets in bytes. A unit is the pooled queries of one head and query block. Their rows are those of a
// batch and KV head: units in the order of query blocks, then heads of the group.
struct ChoosingLayout {
  // entries: key tiles of a tile row at most. partial: of these, with an element mask.
  ChoosingLayout(const AttentionShape& shape, int64_t entries, int64_t partial)
      : pooled_size(PooledSize(shape.D)),
        row_blocks(CeilDiv(shape.S, kBlockQueries)),
        key_blocks(CeilDiv(shape.T, kBlockKeys)),
        query_rows(shape.H / shape.G * row_blocks * (kBlockQueries / kPooledQueries)),
        key_rows(RoundUp(key_blocks * (kBlockKeys / kPooledKeys), kPooledTile)),
        list_stride(entries + partial),
        tile_rows(shape.B * shape.H * row_blocks) {
    const auto put = [this](int64_t bytes) {
      const int64_t at = total;
      total += RoundUp(bytes, 128);
      return at;
    };
    const int64_t heads = shape.B * shape.G;
    pooled_queries = put(2 * heads * query_rows * pooled_size);
    pooled_keys = put(2 * heads * key_rows * pooled_size);
    exists = put(shape.B * key_rows);
    layout = put(4 * shape.B * shape.H);
    for (int64_t* at : {&row_ptr, &row_end, &full_begin, &order}) *at = put(4 * tile_rows);
    lists = put(4 * tile_rows * list_stride);
  }
  int64_t pooled_size;             // elements
  int64_t row_blocks, key_blocks;  // of a head
  int64_t query_rows, key_rows;    // pooled queries, pooled keys of a batch and KV head
  int64_t list_stride;             // words of a tile row's list: its key tiles, then the element masks of partial ones
  int64_t tile_rows;               // of all batches and heads
  int64_t pooled_queries = 0, pooled_keys = 0, exists = 0, layout = 0;
  int64_t row_ptr = 0, row_end = 0, full_begin = 0, order = 0, lists = 0;
  int64_t total = 0;
};

// At most what a call with these arguments, or smaller ones, needs; 0: it computes every block. has_mask: there may be
// partial tiles.
inline int64_t BoundChoosingBytes(const AttentionArgs& args, bool has_mask) {
  const AttentionShape& shape = args.shape;
  if (!ChoosesBlocks(args) || shape.dtype == DType::kF32 || PooledSize(shape.D) == 0 || shape.G <= 0) return 0;
  constexpr int64_t kFewestKeys = 64;  // of a tile
  const int64_t tiles = CeilDiv(shape.T, kFewestKeys);
  return std::min(ChoosingLayout(shape, tiles, has_mask ? tiles : 0).total, kMaxChoiceBytes);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_LAYOUT_H_
