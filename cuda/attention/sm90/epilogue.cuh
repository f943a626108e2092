// SPDX-License-Identifier: Apache-2.0
// The epilogue of the sm_90a kernels: row sums across threads and pipelines, normalization, LSE, stores. Member
// functions of Attention, which uses its registers and barriers; kernel.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM90_EPILOGUE_CUH_
#define STOF_CUDA_ATTENTION_SM90_EPILOGUE_CUH_

#include "cuda/attention/sm90/kernel.cuh"

namespace stof {
namespace cuda {
namespace sm90 {

// What does not need the outputs runs while the last wgmma is in flight.
template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::RowScales Sm90Attention<S, T>::FinalizeRows(
    const WorkTileInfo& info, const float (&row_max)[2], const float (&sum)[2]) const {
  float total[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    total[r] = sum[r];
    total[r] += __shfl_xor_sync(~0u, total[r], 1);
    total[r] += __shfl_xor_sync(~0u, total[r], 2);
  }
  if constexpr (S::kSplit > 1) {
    return FinalizeAcrossPipelines(info, row_max, total);
  } else {
    return FinalizeInPipeline(info, row_max, total);
  }
}

template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::RowScales Sm90Attention<S, T>::FinalizeInPipeline(
    const WorkTileInfo& info, const float (&row_max)[2], float (&total)[2]) const {
  RowScales row_scales;
#pragma unroll
  for (int r = 0; r < 2; ++r) row_scales.empty[r] = total[r] == 0.0f;
  if constexpr (S::kSplitsRows) {
    if (info.subtile >= 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lane_ % 4 == 0) p_.split_stats[info.subtile * 64 + row_ + 8 * r] = make_float2(row_max[r], total[r]);
      }
      return row_scales;
    }
  }
  // This branch also keeps the sums above it under the wgmma: ptxas (13.0) moves the wait to the start of its block.
  if (sink_or_lse_) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!row_scales.empty[r]) total[r] += SinkWeight<T>(p_.attention, info.h, row_max[r]);
      if (lane_ % 4 == 0) {
        StoreLse<T>(p_.attention, info.b, info.h, info.row0 + row_ + 8 * r, row_max[r], total[r]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) row_scales.scale[r] = Reciprocal(total[r]);
  return row_scales;
}

// Normalizes the outputs and stores them by way of shared memory and TMA, without waiting for the store: the next work
// tile's output does.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::StoreOutput(const WorkTileInfo& info, int query,
                                                                 float (&o)[kOutputs], RowScales row_scales) const {
  if constexpr (S::kSplit > 1) {
    CombineAndStore(info, o, row_scales);
    return;
  }
  if constexpr (S::kSplitsRows) {
    if (info.subtile >= 0) {
      StoreSplit(info.subtile, o);
      if (!S::kSeparateOutput) Release(QueryEmpty(query));
      return;
    }
  }
  const AttentionParams& p = p_.attention;
  auto& scale = row_scales.scale;
  const auto& empty = row_scales.empty;
  if (__any_sync(~0u, empty[0] || empty[1]) != 0) {
    // The outputs of fully masked rows may be anything: weights of 0 times inf or NaN.
    const float nothing = static_cast<EmptyRows>(p.empty_rows) == EmptyRows::kNan ? NAN : 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!empty[r]) continue;
      FlagEmptyRow(p_, info.b, info.h, info.row0 + row_ + 8 * r);
      scale[r] = 1.0f;
#pragma unroll
      for (int i = 2 * r; i < kOutputs; i += 4) o[i] = o[i + 1] = nothing;
    }
  }
  // The warpgroup's rows in shared memory, in atoms of 64 columns.
  constexpr int kAtomBytes = 64 * 128;
  const uint32_t place =
      base_ + (S::kSeparateOutput ? S::kOutput : query * S::kQueryBytes) + wg_ * (kHead / kAtom * kAtomBytes);
  // A store waits for the previous one alone. One thread issues the stores of a warpgroup: TMA takes its time per
  // store, not per byte.
  const bool stores = threadIdx.x % kWarpgroup == 0;
  if (S::kSeparateOutput && stores) WaitStoresRead<0>();
  SyncWarpgroup();
  // 128-byte swizzle: chunk c of 16 bytes of row r (of 8) is at c ^ r.
  const uint32_t own = place + (row_ % 64 - lane_ / 4 + lane_ % 16) * 128 + ((lane_ / 16 ^ lane_ % 8) << 4);
#pragma unroll
  for (int j = 0; j < kHead / 8; j += 2) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      word[i] = cuda::Pack<T>(o[4 * j + 2 * i] * scale[i % 2], o[4 * j + 2 * i + 1] * scale[i % 2]);
    }
    StoreMatrix4((own ^ (j % 8 << 4)) + j / 8 * kAtomBytes, word[0], word[1], word[2], word[3]);
  }
  FenceForCopies();
  SyncWarpgroup();
  if (stores) {
#pragma unroll
    for (int c = 0; c < kHead / kAtom; ++c) {
      StoreTensor(&p_.output, place + c * kAtomBytes, c * kAtom, info.row0 + 64 * wg_, info.h * p_.output_step_h,
                  info.b * p_.output_step_b);
    }
    CommitStores();
  }
  if constexpr (!S::kSeparateOutput) {
    if (stores) WaitStoresRead<0>();
    Release(QueryEmpty(query));
  }
}

// Stores the outputs of a split, thread by thread: CombineKernel knows which rows and columns a thread has.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::StoreSplit(int part, const float (&o)[kOutputs]) const {
  float* const to = p_.split_output + (static_cast<int64_t>(part) * kOutputs) * kWarpgroup + threadIdx.x % kWarpgroup;
#pragma unroll
  for (int i = 0; i < kOutputs; ++i) to[i * kWarpgroup] = o[i];
}

// Where pipelines split a work tile, each publishes its row max and row sum, and computes the scale from its outputs to
// the final ones.
template <typename S, typename T>
__device__ __forceinline__ typename Sm90Attention<S, T>::RowScales Sm90Attention<S, T>::FinalizeAcrossPipelines(
    const WorkTileInfo& info, const float (&row_max)[2], const float (&own)[2]) const {
  const AttentionParams& p = p_.attention;
  float2* const stats = reinterpret_cast<float2*>(CombineMemory());
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (lane_ % 4 == 0) stats[pipeline_ * S::kM + row_ + 8 * r] = make_float2(row_max[r], own[r]);
  }
  SyncNamed(kFirstBarrier, kAllConsumers);
  RowScales row_scales;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float2 part[S::kSplit];
    float most = -INFINITY;
#pragma unroll
    for (int t = 0; t < S::kSplit; ++t) {
      part[t] = stats[t * S::kM + row_ + 8 * r];
      most = fmaxf(most, part[t].x);
    }
    const float base = most == -INFINITY ? 0.0f : most;
    float total = 0.0f;
#pragma unroll
    for (int t = 0; t < S::kSplit; ++t) total += part[t].y * Exp2(ScoreDifference(part[t].x, base));
    const bool empty = total == 0.0f;
    if (empty && pipeline_ == 0) FlagEmptyRow(p_, info.b, info.h, info.row0 + row_ + 8 * r);
    if (sink_or_lse_) {
      if (!empty) total += SinkWeight<T>(p, info.h, most);
      if (pipeline_ == 0 && lane_ % 4 == 0) StoreLse<T>(p, info.b, info.h, info.row0 + row_ + 8 * r, most, total);
    }
    row_scales.empty[r] = empty;
    row_scales.scale[r] = empty ? 0.0f : Exp2(ScoreDifference(row_max[r], base)) * Reciprocal(total);
  }
  return row_scales;
}

// Each pipeline then adds up one chunk of the columns from all pipelines, and stores it.
template <typename S, typename T>
__device__ __forceinline__ void Sm90Attention<S, T>::CombineAndStore(const WorkTileInfo& info, float (&o)[kOutputs],
                                                                     const RowScales& row_scales) const {
  const AttentionParams& p = p_.attention;
  const auto& scale = row_scales.scale;
  const auto& empty = row_scales.empty;
  float* const parts = reinterpret_cast<float*>(CombineMemory() + S::kStatsBytes) +
                       wg_ * kWarpgroup * S::kCombineChunk * S::kSplit * (S::kSplit - 1) + threadIdx.x % kWarpgroup;
  const auto part = [&](int chunk, int other) {
    return parts + (chunk * (S::kSplit - 1) + other) * S::kCombineChunk * kWarpgroup;
  };
  float own[S::kCombineChunk];
#pragma unroll
  for (int chunk = 0; chunk < S::kSplit; ++chunk) {
    if (chunk == pipeline_) {
#pragma unroll
      for (int i = 0; i < S::kCombineChunk; ++i) own[i] = o[chunk * S::kCombineChunk + i] * scale[i / 2 % 2];
    } else {
      float* const to = part(chunk, pipeline_ - (pipeline_ > chunk ? 1 : 0));
#pragma unroll
      for (int i = 0; i < S::kCombineChunk; ++i)
        to[i * kWarpgroup] = o[chunk * S::kCombineChunk + i] * scale[i / 2 % 2];
    }
  }
  SyncNamed(kSecondBarrier, kAllConsumers);
#pragma unroll
  for (int other = 0; other < S::kSplit - 1; ++other) {
    const float* const from = part(pipeline_, other);
#pragma unroll
    for (int i = 0; i < S::kCombineChunk; ++i) own[i] += from[i * kWarpgroup];
  }
  const float nothing = static_cast<EmptyRows>(p.empty_rows) == EmptyRows::kNan ? NAN : 0.0f;
  T* const to = static_cast<T*>(p.output) + info.b * p.output_stride.b + info.h * p.output_stride.h;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = info.row0 + row_ + 8 * r;
#pragma unroll
    for (int j = 0; j < S::kCombineChunk / 4; ++j) {
      const int i = 4 * j + 2 * r, column = pipeline_ * 2 * S::kCombineChunk + 8 * j + lane_ % 4 * 2;
      if (row < p.S && column < p.Dv) {
        *reinterpret_cast<uint32_t*>(to + static_cast<int64_t>(row) * p.output_stride.s + column) =
            cuda::Pack<T>(empty[r] ? nothing : own[i], empty[r] ? nothing : own[i + 1]);
      }
    }
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM90_EPILOGUE_CUH_
