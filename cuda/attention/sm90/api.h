// SPDX-License-Identifier: Apache-2.0
// The family of sm_90a kernels: their parameters and tables.
#ifndef STOF_CUDA_ATTENTION_SM90_API_H_
#define STOF_CUDA_ATTENTION_SM90_API_H_

#include <cuda.h>
#include <vector_types.h>

#include "cuda/attention/kernel_table.h"
#include "cuda/attention/params.h"
#include "cuda/common/host_device.h"
#include "cuda/schedule/tile_schedule.h"

namespace stof {
namespace cuda {

struct Int8Params;  // cuda/attention/int8/layout.h

struct Sm90Params {
  CUtensorMap query, key, value, output;  // of tensors [B, H or G, S or T, D]
  CUtensorMap bias;                       // [B, H, S, T], where there is one
  AttentionParams attention;              // its mask has tiles of the kernel's size
  // Factors of the batch and head coordinates: 0 where one batch or head serves all, and the map has one coordinate.
  int32_t query_step_b = 1, query_step_h = 1, key_step_b = 1, key_step_h = 1, value_step_b = 1, value_step_h = 1;
  int32_t output_step_b = 1, output_step_h = 1;
  int32_t bias_step_b = 1, bias_step_h = 1, bias_one_row = 0;  // bias_one_row: all queries share one row
  int32_t ctas = 1;                                            // persistent CTAs of the tile schedule
  // The tile schedule: CTA c has the work tiles that starts[c] names. nullptr: every ctas-th tile row; with a mask, by
  // falling cost within `l2_heads` heads.
  const WorkTile* tiles = nullptr;
  const CtaStart* starts = nullptr;
  int32_t l2_heads = 1;
  int32_t half_tiles = 0;  // without a schedule, 1: every work tile is a half tile
  int32_t cold_l2 = 0;     // 1: L2 holds little of what the kernel reads first, which is then prefetched
  // Split rows, and their workspace. Of each split: the outputs before normalization, [D rounded up / 2, 128] as
  // threads hold them, and row max and row sum of its 64 rows.
  const SplitRow* split_rows = nullptr;  // [split_row_count]
  int32_t split_row_count = 0;
  float* split_output = nullptr;
  float2* split_stats = nullptr;
  int32_t* empty_flags = nullptr;  // [B, H, ceil(S / 64)]: set to 1 where a row is fully masked; nullptr: not wanted
  // Dynamic scheduling: CTAs fetch work tiles [dynamic_begin, dynamic_end) one by one after their own. tile_counter:
  // how many were fetched, 0 before and after a run; nullptr: there are none.
  int32_t* tile_counter = nullptr;
  int32_t dynamic_begin = 0, dynamic_end = 0;
  // Skip by score, for kernels that do. Behind the others, which keep their places for all kernels.
  float skip_distance = 0.0f;                 // SkipDistance in units of log2
  unsigned long long* skip_counts = nullptr;  // SkipCounts in device memory, which is added to; nullptr: no count
  // 8-bit operands: `query`, `key` and perhaps `value` are maps of quantized tensors (int8/layout.h).
  const float* query_scales = nullptr;  // [B, H, S]
  const float* query_shifts = nullptr;  // [B, H, S]: what removing the mean of the keys takes from a row's scores
  const float* tile_scales = nullptr;   // [B, G, KV tiles, kTileScales]
};

// How many KV tiles a kernel that skips by score computes untested after so many tests in a row that kept their tile:
// where nothing can be left out, few tiles are tested. A tile that is left out begins anew.
STOF_HD constexpr int UntestedTiles(int kept_tests) {
  constexpr int kSteady = 6, kMostDoublings = 5;
  if (kept_tests < kSteady) return 0;
  const int doublings = kept_tests - kSteady + 1;
  return (1 << (doublings < kMostDoublings ? doublings : kMostDoublings)) - 1;
}

using Sm90Code = LaunchCode<Sm90Params>;

// Rows of its tables have costs that were measured on an H100 SXM (docs/design/attention-cuda.md). There is none in a
// build without sm_90a, and for ScoreMod::kFullBias with heads above 128.
extern const KernelFamily kSm90Family;

KernelTable FindSm90D64(const KernelProblem& problem);
KernelTable FindSm90D128(const KernelProblem& problem);
KernelTable FindSm90D192(const KernelProblem& problem);
KernelTable FindSm90D256(const KernelProblem& problem);
// Kernels that leave out key tiles by their scores. There are none with a full bias.
KernelTable FindSm90SkipD64(const KernelProblem& problem);
KernelTable FindSm90SkipD128(const KernelProblem& problem);
KernelTable FindSm90SkipD192(const KernelProblem& problem);
KernelTable FindSm90SkipD256(const KernelProblem& problem);
// Kernels with queries and keys in int8, of which those of problems that allow fp8 have weights and values in fp8.
KernelTable FindSm90Int8D64(const KernelProblem& problem);
KernelTable FindSm90Int8D128(const KernelProblem& problem);

// Sets the TMA maps and coordinate factors of params from its `attention`, for a kernel's tile. False where the driver
// has no TMA, or a tensor cannot be described.
bool MakeTensorMaps(bool bf16, int tile_rows, int tile_keys, Sm90Params* params);
// Likewise for 8-bit operands in memory, and a bf16 or fp16 output.
bool MakeInt8TensorMaps(bool bf16, const Int8Params& operands, Sm90Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_API_H_
