// SPDX-License-Identifier: Apache-2.0
// What the host and the kernels of quantized attention share.
#ifndef STOF_CPU_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_
#define STOF_CPU_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_

#include <cstdint>

#include "plugins/core/contract/quantized_attention.h"

namespace stof {
namespace cpu {

// Keys of a tile: as many bytes as the longest vector, as bits of a word.
constexpr int kQuantizedTileKeys = 64;
// Rows of a tile are a multiple of this; register blocks take as many at a time, or a divisor of it.
constexpr int kQuantizedStrip = 12;
// The most rows of a tile. Kernels keep a bit for each row in a word, and an array of row states.
constexpr int kMostQuantizedRows = 4 * kQuantizedStrip;
static_assert(kMostQuantizedRows <= 64, "a word has a bit for each row of a tile");
// The largest head size.
constexpr int64_t kMostQuantizedHeadSize = 256;
// Sums of weights and values are exact over so many keys: 2^15 * 255 * 128 < 2^31.
constexpr int64_t kExactKeys = 32768;

// The arrays of a block mask, without std::vector.
struct QuantizedBlocks {
  const int32_t *row_ptr = nullptr, *full_begin = nullptr, *key_tile = nullptr, *bits_id = nullptr, *layout = nullptr;
  const uint32_t* bits = nullptr;
  int32_t layout_b = 1, layout_h = 1, rows = 0;
};

// One call. Kernels take the first factor of a sum of products as uint8, the second one as int8: codes of the other
// type are moved by 128, with their zero points.
struct QuantizedProblem {
  const QuantizedAttentionArgs* args = nullptr;
  int m = 0, n = 0;
  int64_t tile_rows = 0, key_tiles = 0;
  int64_t key_words = 0;  // of a packed row of queries or keys, 4 bytes each
  int64_t dv_padded = 0;  // of values, padded
  // Scores are kept as codes: there is a rounding, and no bias.
  bool keeps_codes = false;
  QuantizedBlocks blocks;  // row_ptr nullptr: none

  // Bits of keys that exist and that pad does not forbid, [B, key tiles]; nullptr: all that exist.
  uint64_t* key_bits = nullptr;
  // Of each KV head [B, G]: keys [tiles, ...] in the order that products read, and the sums of each key's values;
  // values likewise, and the sums of each tile's values by column.
  int8_t* keys = nullptr;
  int32_t* key_sums = nullptr;  // [B, G, tiles * n]
  int8_t* values = nullptr;
  int32_t* value_sums = nullptr;  // [B, G, tiles, dv_padded]
};

struct QuantizedAttentionKernels {
  // Words of 32 bits that a row of queries or keys is packed into.
  int64_t (*key_words)(int64_t D) = nullptr;
  int64_t (*padded_value_size)(int64_t Dv) = nullptr;
  int64_t (*scratch_bytes)(const QuantizedProblem& problem) = nullptr;
  // Tables that all items read; before the first item of a worker.
  void (*prepare)(const QuantizedProblem& problem, void* scratch) = nullptr;
  // The keys and values of a KV head, 0 ... B * G - 1.
  void (*pack)(const QuantizedProblem& problem, int64_t head) = nullptr;
  // The largest weight of a tile row.
  float (*measure)(const QuantizedProblem& problem, int64_t item, void* scratch) = nullptr;
  // A tile row of a query head: item = (b * H + h) * tile_rows + row.
  void (*attend)(const QuantizedProblem& problem, int64_t item, void* scratch) = nullptr;
};

}  // namespace cpu
}  // namespace stof
#endif  // STOF_CPU_QUANTIZED_ATTENTION_QUANTIZED_ATTENTION_H_
