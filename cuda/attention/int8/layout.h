// SPDX-License-Identifier: Apache-2.0
// The 8-bit operands of an attention in device memory: what the quantization kernels write, and the sm_90a and sm_80
// kernels read (docs/design/attention-8bit.md). Plain C++.
#ifndef STOF_CUDA_ATTENTION_INT8_LAYOUT_H_
#define STOF_CUDA_ATTENTION_INT8_LAYOUT_H_

#include <algorithm>
#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/common/host_device.h"
#include "plugins/core/base/integers.h"

namespace stof {
namespace cuda {

constexpr int kInt8TileKeys = 128;  // keys of a KV tile of every kernel with 8-bit operands

// int32 accumulators start from the bits of this float, 3 * 2^22: below 2^22 in magnitude, sums of products then are
// floats that exceed it by themselves. A conversion would take the unit of the exponentials.
constexpr float kInt8ZeroFloat = 12582912.0f;

// Scales of a KV tile: of its key groups, then of its values; padded for a bulk copy.
constexpr int kKeyGroups = 8, kValueScale = kKeyGroups, kTileScales = 12;

// The group of a key of a tile: a thread has the scores of two keys in every eight, of wgmma as of mma.sync, and so
// meets one group among the first eight keys and one among the others. An attention sink raises the scale of two keys.
STOF_HD constexpr int KeyGroupOf(int key) { return (key < 8 ? 0 : 4) + key % 8 / 2; }

// Where the transposed values of a tile have a key: the order in which a thread's scores are its A fragment of an 8-bit
// wgmma. Within 16 keys, thread t has keys 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t, and the fragment columns 4 t to 4 t + 3.
STOF_HD constexpr int ValueColumnOf(int key) { return key / 16 * 16 + key % 8 / 2 * 4 + key % 16 / 8 * 2 + key % 2; }

// Byte offsets in the workspace, each aligned to 128.
struct Int8Layout {
  int64_t query = 0;         // int8 [B, H, S, D]
  int64_t key = 0;           // int8 [B, G, T, D], less the mean of the keys
  int64_t value = 0;         // e4m3 [B, G, D, tiles * 128], in the order of ValueColumnOf; with fp8 only
  int64_t query_scales = 0;  // float [B, H, S]
  int64_t query_shifts = 0;  // float [B, H, S]
  int64_t tile_scales = 0;   // float [B, G, tiles, kTileScales]
  int64_t key_means = 0;     // float [B, G, D]
  int64_t total = 0;

  Int8Layout(const AttentionShape& shape, bool fp8) {
    const int64_t rows = shape.B * shape.H * shape.S, heads = shape.B * shape.G;
    const int64_t tiles = CeilDiv(shape.T, int64_t{kInt8TileKeys});
    const auto take = [this](int64_t bytes) {
      const int64_t at = total;
      total += RoundUp(bytes, 128);
      return at;
    };
    query = take(rows * shape.D);
    key = take(heads * shape.T * shape.D);
    value = take(fp8 ? heads * tiles * kInt8TileKeys * shape.D : 0);
    query_scales = take(4 * rows);
    query_shifts = take(4 * rows);
    tile_scales = take(4 * heads * tiles * kTileScales);
    key_means = take(4 * heads * shape.D);
  }
};

// The scales that kernels of mma.sync read.
struct Int8Scales {
  const float* query = nullptr;   // Int8Layout::query_scales
  const float* shifts = nullptr;  // Int8Layout::query_shifts; nullptr: not wanted
  const float* tile = nullptr;    // Int8Layout::tile_scales
  int32_t tiles = 0;              // of a head
};

struct Int8Params {
  AttentionParams attention;
  int32_t tiles = 0;  // KV tiles of a head
  int8_t* query = nullptr;
  int8_t* key = nullptr;
  uint8_t* value = nullptr;  // nullptr: values stay as they are
  float* query_scales = nullptr;
  float* query_shifts = nullptr;  // nullptr: not wanted
  float* tile_scales = nullptr;
  float* key_means = nullptr;
  const int32_t* key_ends = nullptr;  // [B]: the number of keys of each sequence; nullptr: T for all
  // Beside key_ends: no query reads a tile behind the keys of its sequence, which stays as it is. Otherwise it becomes
  // zeros.
  bool skips_tiles = false;
};

// The 8-bit operands of an attention in memory of Int8Layout's size. has_fp8_values: values in e4m3, too.
inline Int8Params DescribeOperands(const AttentionParams& attention, const AttentionShape& shape, bool has_fp8_values,
                                   char* memory) {
  const Int8Layout layout(shape, has_fp8_values);
  const auto floats = [memory](int64_t at) { return reinterpret_cast<float*>(memory + at); };
  Int8Params params;
  params.attention = attention;
  params.tiles = static_cast<int32_t>(CeilDiv(shape.T, int64_t{kInt8TileKeys}));
  params.query = reinterpret_cast<int8_t*>(memory + layout.query);
  params.key = reinterpret_cast<int8_t*>(memory + layout.key);
  if (has_fp8_values) params.value = reinterpret_cast<uint8_t*>(memory + layout.value);
  params.query_scales = floats(layout.query_scales);
  if (attention.sink != nullptr || attention.lse != nullptr) params.query_shifts = floats(layout.query_shifts);
  params.tile_scales = floats(layout.tile_scales);
  params.key_means = floats(layout.key_means);
  return params;
}

// Queues the kernels that quantize the operands. bf16: of the inputs. Gives a CUDA error code, 0 for none. stream is a
// cudaStream_t.
int LaunchQuantize(const Int8Params& params, bool bf16, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_LAYOUT_H_
