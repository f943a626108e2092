// SPDX-License-Identifier: Apache-2.0
// Parameters of the kernels that make block masks. Included by mask_builder.cu alone, by way of
// cuda/mask/build/kernels.cuh.
#ifndef STOF_CUDA_MASK_BUILD_BUILD_PARAMS_CUH_
#define STOF_CUDA_MASK_BUILD_BUILD_PARAMS_CUH_

#include <cstdint>

#include "cuda/mask/build/mask_builder.h"
#include "cuda/mask/program/bit_program.h"

namespace stof {
namespace cuda {
namespace mask_build {

constexpr int kThreads = 256;  // of the first kernel
constexpr int kWarps = kThreads / 32;
constexpr int kFewThreads = 128;          // of those that give a warp its own work
constexpr int kMostThreads = 256;         // that evaluate a tile
constexpr int kEvaluating = 1024;         // threads per SM
constexpr int kTogether = 4;              // tiles that are decided as one at first
constexpr int kDecided = 32 * kTogether;  // by a warp
constexpr int kInlineSteps = 64, kInlineAffines = 24, kInlineBitSteps = 18;
constexpr int kMostOrdered = 1024;  // rows of a table that are sorted; more rows balance without

// Bit 0: full, bit 1: partial, as the lists need them. A partial tile is undecided until it is evaluated.
enum TileClass : uint8_t { kEmptyTile = 0, kFullTile = 1, kPartialTile = 2 };

// Passed by value, so that a captured graph keeps it: below the 4 KiB that every driver accepts.
struct Build {
  MaskOperand operands[kMostOperands];
  MaskSide sides[kMostSides];
  int32_t operand_count, steps_count, affines_count, bit_steps_count, sides_count, narrow;
  // Small programs are in here, larger ones in memory.
  const NumberStep* steps;
  const Affine* affines;
  const BitStep* bit_steps;
  NumberStep inline_steps[kInlineSteps];
  Affine inline_affines[kInlineAffines];
  BitStep inline_bit_steps[kInlineBitSteps];
  int32_t m, n, rows, columns;        // tile, tiles along the sides
  int32_t fragments;                  // own words of a thread (fragments.h); 0: bits by row
  int32_t slots;                      // of a table: places of tiles' bits
  int32_t step_rows, step_columns;    // to the next tile of a diagonal; 0: every tile has bits of its own
  int32_t class_stride;               // from one row of classes to the next, a multiple of 16
  int32_t tables, layout_h;           // heads that the mask distinguishes
  int32_t widest;                     // the larger one of rows and columns
  int32_t span;                       // the larger one of rows * m and columns * n
  int32_t summary_ctas;               // of the first kernel
  int64_t side_ctas;                  // of it, each of which takes as many tiles as it has room for
  int64_t b0, h0, q0, queries, keys;  // of the part; q0 is an absolute position
  int64_t* summaries;
  int64_t* extremes;            // [sides, tables, widest, 2] of tiles
  int64_t* values;              // [sides, tables, span] of queries or keys
  uint8_t* classes;             // [tables, rows, class_stride]
  unsigned long long* numbers;  // [tables, rows] of tiles: 2^32 for each partial one, 1 for each full one
  uint2* undecided;             // row of all tables; column times 2, plus 1 where 32 bits are enough for the values
  int32_t* count;               // of those
  int32_t* invalid;
  int32_t *layout, *row_begin, *row_end, *full_begin, *key_tile, *bits_id, *order;
  uint32_t* bits;
};
static_assert(sizeof(Build) <= 4096, "parameters of a kernel");

}  // namespace mask_build
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_BUILD_BUILD_PARAMS_CUH_
