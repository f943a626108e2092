// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels that choose blocks (plugins/core/contract/chosen_blocks.h), and their launch.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_PARAMS_H_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_PARAMS_H_

#include <cuda.h>

#include <cstdint>

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

// Passed to kernels by value; pointers are device addresses. choose_blocks/layout.h has the sizes.
struct BlockChoiceParams {
  CUtensorMap query_map, key_map;  // pooled queries and keys, [B * G, rows, pooled_size]
  // Queries, keys, scale, softcap, pad_bits, and the mask that the chosen tiles are taken from: tiles of kBlockQueries
  // queries and kBlockKeys / tiles_of_block keys.
  AttentionParams attention;
  int32_t pooled_size = 0;
  int32_t row_blocks = 0, key_blocks = 0, query_rows = 0, key_rows = 0;
  int32_t tiles_of_block = 1, list_stride = 0;
  float threshold = 0.0f;
  // The key at the position of query 0: first_position + (first_rows != nullptr ? first_rows[b] : 0). With first_rows,
  // sequence b has key_offset + first_rows[b] keys.
  int32_t first_position = 0, key_offset = 0;
  const int32_t* first_rows = nullptr;
  // Workspace.
  void* pooled_queries = nullptr;
  void* pooled_keys = nullptr;
  uint8_t* exists = nullptr;  // [B, key_rows]: 1 where a pooled key has a key, else 0
  // The chosen tiles: a DeviceMask with a table for every batch and head. Tile row r has its key tiles at
  // lists + r * list_stride.
  int32_t *layout = nullptr, *row_ptr = nullptr, *row_end = nullptr, *full_begin = nullptr, *order = nullptr;
  int32_t *key_tile = nullptr, *bits_id = nullptr;
  unsigned long long* skip_counts = nullptr;  // SkipCounts, which is added to; nullptr: no count
  int32_t counts_kept = 1;                    // 0: the attention kernel counts the tiles that it gets
};

// Pooled keys of a tile of estimates.
constexpr uint32_t PooledTileRows(int64_t pooled_size) { return pooled_size <= 128 ? 128 : 64; }

// Whether the kernel's shared memory fits.
bool CanChooseBlocks(int64_t pooled_size, int64_t key_blocks, int shared_bytes);

// Sets the TMA maps of pooled queries and keys. False where the driver has no TMA.
bool MakePooledMaps(bool bf16, BlockChoiceParams* params);

// Queues the kernels that pool queries and keys, choose blocks and order tile rows by falling length. Gives a CUDA
// error code, 0 for none. stream is a cudaStream_t.
int LaunchChooseBlocks(bool bf16, const BlockChoiceParams& params, int sm_count, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_PARAMS_H_
