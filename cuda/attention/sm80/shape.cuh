// SPDX-License-Identifier: Apache-2.0
// The shape of the kernel for compute capability 8.0, and how rows lie in its shared memory; constants of scores that
// other kernels have, too.
#ifndef STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/params.h"
#include "cuda/common/math.h"
#include "cuda/common/mma_sm80.cuh"

namespace stof {
namespace cuda {

constexpr float kLowest = -3.4028234663852886e38f;
// The running maximum is raised only when a score exceeds it by 2^8, so that the output is rescaled a few times per row
// (FlashAttention 4 has the same idea).
constexpr float kSlack = 8.0f;

// CTAs of 128 rows have warps of 32: they read keys and values half as often as those of 16, which is what bounds dense
// attention. Biases and the output of heads above 128 need the registers. CTAs of 64 rows, half a tile of the mask,
// have warps of 16: where there are few rows, twice as many multiprocessors work at them.
template <int kHead, bool kScoreMod, int kRows>
struct Shape {
  static constexpr int kM = kRows, kN = kTileKeys;
  static constexpr int kCtasPerTile = kTileRows / kM;  // CTAs for a tile of the mask
  // Heads above 128. CTAs of 128 rows may find too little shared memory for keys and values: then one buffer is for
  // both in turn.
  static constexpr bool kLargeHead = kHead > 128;
  static constexpr int kWarps = kLargeHead && kM == kTileRows ? 8 : 4;
  // Queries stay in registers where there is room, and are read again for each tile otherwise.
  static constexpr bool kQueriesInRegisters = !kLargeHead && (kHead <= 64 || kM < kTileRows);
  // Buffers for keys and for values. With one, the keys of a tile come under the softmax and the product with the
  // values of the tile before, and its values under its scores; two CTAs fit a multiprocessor then.
  static constexpr int kStages = kHead <= 64 || (kHead <= 128 && kM < kTileRows) ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps;
  // A partial tile's bits are asked for behind the products of its scores, instead of where they are looked at: one
  // branch more for every tile, by which 64 rows are up to 2 % slower (docs/lab/cuda-experiments.md).
  static constexpr bool kEarlyMask = kStages == 2 && kM == kTileRows;
  static constexpr int kBlocks = kM / kWarps / 16;  // of 16 rows, a warp
  static constexpr int kChunks = kHead / 8;         // of 16 bytes, a row
  static constexpr int kStage = kN * kHead;         // elements
  static constexpr int SharedBytes(int stages) { return 2 * (kM * kHead + (stages == 0 ? 1 : 2 * stages) * kStage); }
  // CTAs that share a multiprocessor.
  static constexpr int kSmall = kHead > 64 ? 2 : kScoreMod ? 4 : 3;
  static constexpr int kCtas = kM < kTileRows ? kSmall : kLargeHead ? 1 : 2;
};

// Where chunk c of a row lies: neighbours of a column of chunks fall into different banks.
template <int kHead>
__device__ __forceinline__ int SwizzledOffset(int row, int chunk) {
  return row * kHead + ((chunk ^ (kHead % 64 == 0 ? row & 7 : row >> 1 & 3)) << 3);
}
// The address of a chunk from that of chunk 0 or 1 of its row, `chunks` before it: an even number that the compiler
// knows, so that all chunks of a row take a few registers and otherwise constants.
template <int kHead>
__device__ __forceinline__ uint32_t ChunkAddress(uint32_t address, int chunks) {
  constexpr int kPlaces = kHead % 64 == 0 ? 8 : 4;  // that chunks change with one another
  const auto turned = static_cast<uint32_t>(chunks % kPlaces), on = static_cast<uint32_t>(chunks) - turned;
  return (address ^ turned << 4) + (on << 4);
}

// Rows [first, first + kCount) of a head with `rows` rows of `size` elements into shared memory, zeros beyond either
// end. No state: what a thread could keep for the next tile is registers that the wide heads do not have.
template <int kHead, int kThreads, int kCount, typename T>
__device__ __forceinline__ void LoadRows(uint32_t to, const T* from, int64_t stride, int first, int rows, int size) {
  constexpr int kChunks = kHead / 8;
  // Neighbouring threads take a power of two of a row's chunks, so that a thread's others are constants away from its
  // first, in memory as in shared memory.
  constexpr int kPower = kChunks & -kChunks, kLanes = kPower > kThreads / 8 ? kThreads / 8 : kPower;
  constexpr int kTurns = kChunks / kLanes;
  constexpr int kStep = kThreads / kLanes;  // rows between two of a thread
  static_assert(kStep % 8 == 0 && kCount % kStep == 0, "chunks have the same places in all of a thread's rows");
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
