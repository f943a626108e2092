// SPDX-License-Identifier: Apache-2.0
// The workspace of the fp32 kernels: keys and values, split into fp16 values. Plain C++.
#ifndef STOF_CUDA_ATTENTION_FP32_WORKSPACE_H_
#define STOF_CUDA_ATTENTION_FP32_WORKSPACE_H_

#include <cstdint>

#include "cuda/mask/mask_params.h"

namespace stof {
namespace cuda {

// Head sizes that kernels are compiled for, in rising order.
constexpr int kFp32HeadSizes[] = {32, 64, 96, 128, 192, 256};
constexpr int kFp32MostPlanes = 2;  // high and low parts

// Offsets in bytes. tiles: of kTileKeys keys, of all batches and KV heads.
struct Fp32Workspace {
  constexpr Fp32Workspace(int64_t tiles, int planes, int head_size)
      : value_tiles(tiles * 2 * planes * kTileKeys * head_size),
        key_factors(2 * value_tiles),
        value_factors(key_factors + 4 * tiles * kTileKeys),
        bytes(value_factors + 4 * tiles) {}
  int64_t key_tiles = 0;
  int64_t value_tiles;
  int64_t key_factors;    // floats
  int64_t value_factors;  // floats
  int64_t bytes;
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_WORKSPACE_H_
