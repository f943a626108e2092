// SPDX-License-Identifier: Apache-2.0
// Compile-time shape of the sm_80 kernel, its swizzled shared memory, and constants that other kernels share.
#ifndef STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/common/host_device.h"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

constexpr float kLowest = -3.4028234663852886e38f;
// The row max is raised only when a score exceeds it by 2^8, so that the output is rescaled a few times a row
// (FlashAttention 4 has the same idea).
constexpr float kSlack = 8.0f;

// What a kernel computes scores of: the inputs alone, these and relative terms (cuda/attention/relative/), or codes in
// int8 (cuda/attention/int8/).
enum class Sm80Scores { kPlain, kRelative, kInt8 };

// In CTAs of 128 rows a warp has 32 rows: it reads keys and values half as often as with 16, which bounds dense
// attention. With biases, or heads above 128, the registers suffice for 16 rows alone. CTAs of 64 rows, half a mask
// tile, have warps of 16 rows: with few tile rows they use twice as many SMs.
template <int kHead, bool kScoreMod, int kRows>
struct Sm80Shape {
  static constexpr int kM = kRows, kN = kTileKeys;
  static constexpr int kCtasPerTile = kTileRows / kM;  // CTAs for a tile of the block mask
  // Heads above 128. CTAs of 128 rows may lack shared memory for keys and values: these then share one buffer.
  static constexpr bool kLargeHead = kHead > 128;
  static constexpr int kWarps = kLargeHead && kM == kTileRows ? 8 : 4;
  // Queries stay in registers where these suffice, and are read again for each KV tile otherwise.
  static constexpr bool kQueriesInRegisters = !kLargeHead && (kHead <= 64 || kM < kTileRows);
  // Buffers for keys and for values. With one of each, the next keys arrive under softmax and P V of this tile, and its
  // values under Q Kᵀ; two CTAs then fit an SM.
  static constexpr int kStages = kHead <= 64 || (kHead <= 128 && kM < kTileRows) ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps;
  // Whether the element mask of a partial tile is loaded before the wait for the scores. The additional branch makes 64
  // rows up to 2 % slower (docs/lab/cuda-experiments.md).
  static constexpr bool kEarlyMask = kStages == 2 && kM == kTileRows;
  static constexpr int kBlocks = kM / kWarps / 16;  // blocks of 16 rows of a warp
  static constexpr int kChunks = kHead / 8;         // chunks of 16 bytes of a row
  static constexpr int kStage = kN * kHead;         // elements
  STOF_HD static constexpr int SharedBytes(int stages) {
    return 2 * (kM * kHead + (stages == 0 ? 1 : 2 * stages) * kStage);
  }
  // CTAs an SM.
  static constexpr int kSmall = kHead > 64 ? 2 : kScoreMod ? 4 : 3;
  static constexpr int kCtas = kM < kTileRows ? kSmall : kLargeHead ? 1 : 2;
};

// CTAs an SM. Relative terms need registers for their products.
template <int kHead, bool kScoreMod, int kRows, bool kRelative>
constexpr int Sm80Ctas =
    kRelative && Sm80Shape<kHead, kScoreMod, kRows>::kCtas > 3 ? 3 : Sm80Shape<kHead, kScoreMod, kRows>::kCtas;

// Shared memory of kernels with relative terms. Heads up to 128 keep the expanded rows that a tile reads in rings:
// loads from L1 missed it too often (docs/lab/cuda-experiments.md). Keys then have one buffer, and values have the
// memory of the queries, which are in registers. Above 64, 99 KiB hold two rings: relative_key1 has none.
template <int kHead, bool kScoreMod, int kRows, bool kRelative>
struct Sm80RelativeShape {
  using S = Sm80Shape<kHead, kScoreMod, kRows>;
  static constexpr bool kHasRings = kRelative && !S::kLargeHead;
  static constexpr int kStages = kHasRings ? 1 : S::kStages;
  static constexpr int kMostRings = kHead <= 64 ? 3 : 2;
  static constexpr int kRingRows = S::kM + S::kN;
  static constexpr int kRingBytes = kHasRings ? 2 * kRingRows * kHead : 0;
  // In front of the rings are 4 bytes a thread, which prefetches write to.
  STOF_HD static constexpr int PrefetchBegin(int stages) {
    return kHasRings ? 2 * (S::kM * kHead + S::kStage) : S::SharedBytes(stages);
  }
  STOF_HD static constexpr int RingsBegin() { return PrefetchBegin(kStages) + 4 * S::kThreads; }
  // Whether a band has a ring.
  STOF_HD static constexpr bool HasRing(bool is_second_key) { return kHasRings && (kMostRings == 3 || !is_second_key); }
  STOF_HD static constexpr int SharedBytes(int stages, int rings) {
    return kRelative ? PrefetchBegin(stages) + 4 * S::kThreads + rings * kRingBytes : S::SharedBytes(stages);
  }
};

// Shared memory of kernels with queries and keys in int8. A row of them is one of half as many 16-bit words: mma.sync
// of 32 bytes has the fragments of mma.sync of 16 words. The scales of a KV tile are behind its keys.
template <int kHead, int kRows>
struct Sm80Int8Shape {
  using S = Sm80Shape<kHead, false, kRows>;
  static constexpr int kWords = kHead / 2;
  static constexpr int kScales = S::kN * kHead, kScaleBytes = 128;  // rows begin at multiples of 128 bytes
  static constexpr int kQueryBytes = S::kM * kHead, kKeyBytes = kScales + kScaleBytes, kValueBytes = 2 * S::kStage;
  static constexpr int kQueryScales = kQueryBytes + S::kStages * (kKeyBytes + kValueBytes);
  static constexpr int kSharedBytes = kQueryScales + 4 * S::kM;
  static_assert(2 * S::kM * kHead <= kQueryScales, "outputs are staged there");
};

// The element offset of chunk c of a row, swizzled: the chunks of a column are in different banks.
template <int kHead>
__device__ __forceinline__ int SwizzledOffset(int row, int chunk) {
  return row * kHead + ((chunk ^ (kHead % 64 == 0 ? row & 7 : row >> 1 & 3)) << 3);
}
// The address of the chunk `chunks` behind chunk 0 or 1 of its row. An even compile-time number, so that all chunks of
// a row need few registers.
template <int kHead>
__device__ __forceinline__ uint32_t ChunkAddress(uint32_t address, int chunks) {
  constexpr int kPlaces = kHead % 64 == 0 ? 8 : 4;  // chunks among which the swizzle permutes
  const auto turned = static_cast<uint32_t>(chunks % kPlaces), on = static_cast<uint32_t>(chunks) - turned;
  return (address ^ turned << 4) + (on << 4);
}

// Loads rows [first, first + kCount) of a head with `rows` rows of `size` elements into shared memory, zeros out of
// bounds. It keeps no state for the next tile: wide heads lack the registers.
template <int kHead, int kThreads, int kCount, typename T>
__device__ __forceinline__ void LoadRows(uint32_t to, const T* from, int64_t stride, int first, int rows, int size) {
  constexpr int kChunks = kHead / 8;
  // Neighbouring threads load a power of two of a row's chunks: the offsets of a thread's other chunks are then
  // constants.
  constexpr int kPower = kChunks & -kChunks, kLanes = kPower > kThreads / 8 ? kThreads / 8 : kPower;
  constexpr int kTurns = kChunks / kLanes;
  constexpr int kStep = kThreads / kLanes;  // distance of the rows of a thread
  static_assert(kStep % 8 == 0 && kCount % kStep == 0, "all rows of a thread have the same swizzle");
  const bool whole = size == kHead && first + kCount <= rows;
  const int chunk = static_cast<int>(threadIdx.x) % kLanes, row = static_cast<int>(threadIdx.x) / kLanes;
  bool inside[kTurns];
#pragma unroll
  for (int j = 0; j < kTurns; ++j) inside[j] = 8 * (chunk + j * kLanes) < size;
  const uint32_t place = to + 2 * static_cast<uint32_t>(SwizzledOffset<kHead>(row, chunk));
  const T* source = from + (first + row) * stride + 8 * chunk;
  if (whole) {
#pragma unroll
    for (int i = 0; i < kCount / kStep; ++i) {
#pragma unroll
      for (int j = 0; j < kTurns; ++j) {
        CopyAsync16(place + 2 * (i * kStep * kHead + 8 * j * kLanes), source + 8 * j * kLanes);
      }
      source += kStep * stride;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount / kStep; ++i) {
#pragma unroll
    for (int j = 0; j < kTurns; ++j) {
      const bool valid = inside[j] && first + row + i * kStep < rows;
      CopyAsync16(place + 2 * (i * kStep * kHead + 8 * j * kLanes), valid ? source + 8 * j * kLanes : from, valid);
    }
    source += kStep * stride;
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_
