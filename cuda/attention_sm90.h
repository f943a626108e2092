// SPDX-License-Identifier: Apache-2.0
// What the sm_90a kernels get beyond AttentionParams, and how it is made.
#ifndef STOF_CUDA_ATTENTION_SM90_H_
#define STOF_CUDA_ATTENTION_SM90_H_

#include <cuda.h>

#include "cuda/attention.h"

namespace stof {
namespace cuda {

constexpr int kSm90TileRows = 128, kSm90TileKeys = 128;

struct Sm90Params {
  CUtensorMap query, key, value;  // of tensors [B, H or G, S or T, D]
  AttentionParams attention;      // its mask has tiles of kSm90TileRows × kSm90TileKeys
  // 0 where one batch or head serves all, else 1: the map has one coordinate there.
  int32_t query_step_b = 1, query_step_h = 1, key_step_b = 1, key_step_h = 1, value_step_b = 1, value_step_h = 1;
  // Items (b * H + h) * rows + row of CTA c: work[work_begin[c]] up to work[work_begin[c + 1]]; nullptr: every
  // gridDim.x-th one.
  const int32_t* work = nullptr;
  const int32_t* work_begin = nullptr;
  int32_t* redo = nullptr;  // [B, H, ceil(S / 64)], set to 1 where a row has no key; nullptr: nobody asks
};

// Fills the maps and steps of params from its `attention`. False where the driver has no bulk copies or a tensor cannot
// be described.
bool DescribeTensors(bool bf16, Sm90Params* params);

using LaunchSm90 = int (*)(const Sm90Params& params, int ctas, void* stream);
LaunchSm90 FindSm90(int head_size, bool bf16);  // nullptr in a build without sm_90a

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_H_
