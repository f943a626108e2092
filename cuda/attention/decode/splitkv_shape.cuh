// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the split-KV decode kernel.
#ifndef STOF_CUDA_ATTENTION_DECODE_SPLITKV_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_DECODE_SPLITKV_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

// T: the type of queries. Stored: that of keys and values, T or a quantized type.
template <int kHead, typename T, typename Stored, int kBlocks>
struct DecodeShape {
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kRows = 8 * kBlocks;
  // Elements of a load, and its words: 16 bytes, unless eight lanes then load more than a row.
  static constexpr int kWidest = 16 / static_cast<int>(sizeof(Stored));
  static constexpr int kPerLoad = kWidest < kHead / 8 ? kWidest : kHead / 8;
  static constexpr int kWords = kPerLoad * static_cast<int>(sizeof(Stored)) / 4;
  // Two register buffers take turns. Each holds 16 keys, or half of each of 16 keys where that needs too many
  // registers.
  static constexpr bool kHalfBuffers = kHead * sizeof(Stored) * kBlocks > 512;
  static constexpr int kGroups = kHalfBuffers ? 1 : 2;  // groups of 16 keys in a step of a warp
  static constexpr int kChunks =
      kHead / (4 * kPerLoad) / (kHalfBuffers ? 2 : 1);  // loads of a key's row in a buffer, by 4 lanes
  static constexpr int kLoads = 2 * kChunks;            // loads of a lane into a buffer
  static constexpr int kWarpsPerTile = kTileKeys / (16 * kGroups);
  static constexpr int kTilesAtOnce = kWarps / kWarpsPerTile;  // KV tiles that a CTA works on at once
  static constexpr int kPerQueryLoad = 16 / static_cast<int>(sizeof(T));
  static constexpr int kQueryChunks = kHead / (4 * kPerQueryLoad);
  static constexpr int kQueriesPerLoad = kPerLoad / kPerQueryLoad;  // query chunks for a chunk of keys
  static constexpr int kOutputs = kHead / 16;                       // blocks of 16 output elements
  static constexpr int kRegisters = kHead * static_cast<int>(sizeof(Stored)) * kBlocks;
  // CTAs an SM. What quantized values are converted to takes registers besides.
  static constexpr bool kHasFewRegisters = sizeof(Stored) == 1 && (kBlocks > 1 || kHead > 128);
  static constexpr int kCtas = (kRegisters <= 128 ? 4 : kRegisters <= 256 ? 3 : 2) - (kHasFewRegisters ? 1 : 0);
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_SPLITKV_SHAPE_CUH_
