// SPDX-License-Identifier: Apache-2.0
// What the sm_90a kernels get beyond AttentionParams, and how it is made.
#ifndef STOF_CUDA_ATTENTION_SM90_API_H_
#define STOF_CUDA_ATTENTION_SM90_API_H_

#include <cuda.h>
#include <vector_types.h>

#include <string>

#include "cuda/attention/params.h"
#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {

struct Sm90Params {
  CUtensorMap query, key, value, output;  // of tensors [B, H or G, S or T, D]
  CUtensorMap bias;                       // [B, H, S, T], where there is one
  AttentionParams attention;              // its mask has the kernel's tiles
  // 0 where one batch or head serves all, else 1: the map has one coordinate there.
  int32_t query_step_b = 1, query_step_h = 1, key_step_b = 1, key_step_h = 1, value_step_b = 1, value_step_h = 1;
  int32_t output_step_b = 1, output_step_h = 1;
  int32_t bias_step_b = 1, bias_step_h = 1, bias_one_row = 0;  // bias_one_row: all queries share a row
  int32_t ctas = 1;                                            // producers with their consumers
  // Worker w has the items of `work` that work_start[w] says; nullptr: every workers-th row, with a mask by falling
  // cost within `section` heads.
  const WorkTile* tiles = nullptr;
  const CtaStart* starts = nullptr;
  int32_t l2_heads = 1;
  int32_t half_tiles =
      0;                // 1 without a plan: of a kernel that can, every item is one of a row's two groups of 64 queries
  int32_t cold_l2 = 0;  // 1: so large that a kernel finds little in the L2 cache of what it reads first
  // Rows in parts: of every part the outputs before they are divided, [D rounded up / 2, 128] as threads have them, and
  // the maximum and sum of each of its 64 rows.
  const SplitRow* split_rows = nullptr;  // [cut_rows]
  int32_t split_row_count = 0;
  float* split_output = nullptr;
  float2* split_stats = nullptr;
  int32_t* empty_flags = nullptr;  // [B, H, ceil(S / 64)], set to 1 where a row has no key; nullptr: nobody asks
  // Items [dynamic_begin, dynamic_end) of `work` are nobody's: workers draw them one by one, and each has an item of
  // its own before. drawn: how often they did, 0 before and after a run; nullptr: there are none.
  int32_t* tile_counter = nullptr;
  int32_t dynamic_begin = 0, dynamic_end = 0;
};

// What a kernel takes beyond the mask: softcap, a bias by distance and scales that are not positive, or these and a
// bias of every pair.
enum class ScoreMod { kNone, kRelativeBias, kFullBias };

using LaunchSm90 = int (*)(const Sm90Params& params, void* stream);

// One compiled kernel: its tile, workers a multiprocessor, elements of a head in its tiles, what workers need (measured
// on an H100 SXM, docs/design/attention-cuda.md).
struct Sm90Kernel {
  int rows = 0, keys = 0, ctas_per_sm = 0, head = 0;
  TileCost cost;
  LaunchSm90 launch = nullptr;  // nullptr: no further one
};
// "sm90-128x64x2": rows, keys, workers. What a node's attribute `kernel` names.
std::string KernelName(const Sm90Kernel& kernel);
// The kernels for a head size, rounded up to 64, 128, 192 or 256; none in a build without sm_90a, and of pairs' biases
// for heads above 128.
const Sm90Kernel* FindSm90(int head_size, bool bf16, ScoreMod score_mod);

// Whether such kernels can read the problem's bias of pairs, if it has one: keys side by side, rows that begin at
// multiples of 16 bytes.
bool CanReadBias(const AttentionParams& params);

// Fills the maps and steps of params from its `attention`, for a kernel's tile. False where the driver has no bulk
// copies or a tensor cannot be described: a bias, say, whose rows do not begin at multiples of 16 bytes.
bool MakeTensorMaps(bool bf16, int tile_rows, int tile_keys, Sm90Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_API_H_
