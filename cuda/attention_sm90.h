// SPDX-License-Identifier: Apache-2.0
// What the sm_90a kernels get beyond AttentionParams, and how it is made.
#ifndef STOF_CUDA_ATTENTION_SM90_H_
#define STOF_CUDA_ATTENTION_SM90_H_

#include <cuda.h>

#include "cuda/attention.h"

namespace stof {
namespace cuda {

struct Sm90Params {
  CUtensorMap query, key, value;  // of tensors [B, H or G, S or T, D]
  AttentionParams attention;      // its mask has the kernel's tiles
  // 0 where one batch or head serves all, else 1: the map has one coordinate there.
  int32_t query_step_b = 1, query_step_h = 1, key_step_b = 1, key_step_h = 1, value_step_b = 1, value_step_h = 1;
  // Items (b * H + h) * rows + row of CTA c: work[work_begin[c]] up to work[work_begin[c + 1]]; nullptr: every
  // gridDim.x-th one.
  const int32_t* work = nullptr;
  const int32_t* work_begin = nullptr;
  int32_t* redo = nullptr;  // [B, H, ceil(S / 64)], set to 1 where a row has no key; nullptr: nobody asks
};

using LaunchSm90 = int (*)(const Sm90Params& params, int ctas, void* stream);

// One compiled kernel: its tile, CTAs a multiprocessor, and what a row and a tile cost, in cycles of a multiprocessor
// that its CTAs share.
struct Sm90Kernel {
  int rows = 0, keys = 0, ctas = 0;
  LaunchSm90 launch = nullptr;  // nullptr: no further one
};
// The kernels for a head size, rounded up to 64 or 128; none in a build without sm_90a.
const Sm90Kernel* FindSm90(int head_size, bool bf16);

// Fills the maps and steps of params from its `attention`. False where the driver has no bulk copies or a tensor cannot
// be described.
bool DescribeTensors(bool bf16, int tile_keys, Sm90Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_H_
