// SPDX-License-Identifier: Apache-2.0
// The first of the kernels that make block masks (cuda/mask/build/kernels.cuh): extremes of the sides of queries and
// keys. And the loading of the program, for all of them. Included by cuda/mask/build/kernels.cuh alone.
#ifndef STOF_CUDA_MASK_BUILD_EXTREMES_CUH_
#define STOF_CUDA_MASK_BUILD_EXTREMES_CUH_

#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/mask/build/build_params.cuh"

namespace stof {
namespace cuda {
namespace mask_build {

__device__ __forceinline__ int64_t Shuffled(int64_t x, int lanes) { return __shfl_xor_sync(~0u, x, lanes); }
__device__ __forceinline__ void OfWarp(int64_t* low, int64_t* high) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    *low = Least(*low, Shuffled(*low, lanes));
    *high = Most(*high, Shuffled(*high, lanes));
  }
}

// Of every 32 and 1024 elements of the vectors; a CTA takes 1024.
__device__ void Summarize(const Build& p, int group) {
  constexpr int kBlock = MaskOperand::kBlock, kGroup = MaskOperand::kGroup, kBlocks = kGroup / kBlock;
  __shared__ int64_t lows[kBlocks], highs[kBlocks];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int which = 0;
  for (; which < p.operand_count; ++which) {
    const MaskOperand& operand = p.operands[which];
    const int groups = operand.blocks < 0 ? 0 : (operand.count + kGroup - 1) / kGroup;
    if (group < groups) break;
    group -= groups;
  }
  if (which == p.operand_count) return;
  const MaskOperand& operand = p.operands[which];
#pragma unroll
  for (int i = warp; i < kBlocks; i += kWarps) {
    const int64_t block = static_cast<int64_t>(group) * kBlocks + i, at = block * kBlock + lane;
    // Beyond the end the last element again.
    int64_t low = ReadElement(operand, at < operand.count ? at : operand.count - 1), high = low;
    OfWarp(&low, &high);
    if (lane != 0) continue;
    lows[i] = low, highs[i] = high;
    if (block * kBlock < operand.count) {
      p.summaries[2 * (operand.blocks + block)] = low;
      p.summaries[2 * (operand.blocks + block) + 1] = high;
    }
  }
  __syncthreads();
  if (warp != 0) return;
  int64_t low = lows[lane], high = highs[lane];
  OfWarp(&low, &high);
  if (lane == 0) {
    p.summaries[2 * (operand.groups + group)] = low;
    p.summaries[2 * (operand.groups + group) + 1] = high;
  }
}

// The program in shared memory; for all threads of a CTA.
__device__ __forceinline__ MaskView Share(const Build& p, unsigned char* shared, MaskOperand* operands,
                                          MaskSide* sides) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  auto* const affines = reinterpret_cast<Affine*>(shared);
  auto* const bit_steps = reinterpret_cast<BitStep*>(affines + p.affines_count);
  auto* const steps = reinterpret_cast<NumberStep*>(bit_steps + p.bit_steps_count);
  const bool carried = p.steps != nullptr;
  const Affine* from = carried ? p.affines : p.inline_affines;
  const BitStep* from_bit_steps = carried ? p.bit_steps : p.inline_bit_steps;
  const NumberStep* from_steps = carried ? p.steps : p.inline_steps;
  for (int i = thread; i < p.affines_count; i += threads) affines[i] = from[i];
  for (int i = thread; i < p.bit_steps_count; i += threads) bit_steps[i] = from_bit_steps[i];
  for (int i = thread; i < p.steps_count; i += threads) steps[i] = from_steps[i];
  if (thread < p.operand_count) operands[thread] = p.operands[thread];
  if (thread < p.sides_count) sides[thread] = p.sides[thread];
  __syncthreads();
  MaskView view;
  view.steps = steps, view.affines = affines, view.operands = operands, view.summaries = p.summaries;
  view.bit_steps = bit_steps, view.sides = sides, view.bit_steps_count = p.bit_steps_count;
  view.count = p.steps_count, view.narrow = p.narrow;
  return view;
}

// A CTA takes a side of all queries or keys of some tiles' rows or columns, a thread one of them.
__device__ void FindExtremes(const Build& p, const MaskView& view, int64_t cta) {
  __shared__ int64_t lows[kWarps], highs[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int side = 0, tiles = 0, size = 0, together = 0, ctas = 0;
  for (;; ++side) {
    const bool keys = view.sides[side].keys != 0;
    tiles = keys ? p.columns : p.rows, size = keys ? p.n : p.m;
    together = kThreads / size;
    ctas = (tiles + together - 1) / together;
    if (cta < int64_t{p.tables} * ctas) break;
    cta -= int64_t{p.tables} * ctas;
  }
  const MaskSide own = view.sides[side];
  const int table = static_cast<int>(cta / ctas), tile0 = static_cast<int>(cta % ctas) * together;
  const int64_t b = p.b0 + table / p.layout_h, h = p.h0 + table % p.layout_h;
  const int64_t at = static_cast<int64_t>(tile0) * size + thread;
  const int64_t of_table = static_cast<int64_t>(side) * p.tables + table;
  int64_t low = INT64_MAX, high = INT64_MIN;
  if (thread < together * size && at < (own.keys != 0 ? p.keys : p.queries)) {
    low = high = EvaluateOne(view, own.first, own.count, b, h, p.q0 + (own.keys != 0 ? 0 : at), own.keys != 0 ? at : 0);
    p.values[of_table * p.span + at] = low;
  }
  OfWarp(&low, &high);
  if (lane == 0) lows[warp] = low, highs[warp] = high;
  __syncthreads();
  if (thread >= together || tile0 + thread >= tiles) return;
  const int warps = size / 32;
  for (int i = 0; i < warps; ++i) {
    low = i == 0 ? lows[thread * warps] : Least(low, lows[thread * warps + i]);
    high = i == 0 ? highs[thread * warps] : Most(high, highs[thread * warps + i]);
  }
  int64_t* const to = p.extremes + 2 * (of_table * p.widest + tile0 + thread);
  to[0] = low, to[1] = high;
}

__global__ void __launch_bounds__(kThreads) Prepare(const __grid_constant__ Build p) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ MaskOperand operands[kMostOperands];
  __shared__ MaskSide sides[kMostSides];
  LetNextStart();
  const int thread = static_cast<int>(threadIdx.x), cta = static_cast<int>(blockIdx.x);
  const int64_t threads = int64_t{gridDim.x} * kThreads, all = static_cast<int64_t>(p.tables) * p.rows;
  for (int64_t i = int64_t{cta} * kThreads + thread; i < all; i += threads) {
    p.numbers[i] = 0;
    if (i < p.tables) p.layout[i] = static_cast<int32_t>(i);
    if (i == 0) *p.count = 0;
  }
  if (cta < p.summary_ctas) return Summarize(p, cta);
  if (cta - p.summary_ctas >= p.side_ctas) return;
  const MaskView view = Share(p, shared, operands, sides);
  FindExtremes(p, view, cta - p.summary_ctas);
}

}  // namespace mask_build
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_BUILD_EXTREMES_CUH_
