// SPDX-License-Identifier: Apache-2.0
// The shape of the kernel for compute capability 8.0, and how rows lie in its shared memory; constants of scores that
// other kernels have, too.
#ifndef STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_
#define STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_

#include <cuda_runtime.h>

#include "cuda/attention.h"
#include "cuda/mma_sm80.cuh"

namespace stof {
namespace cuda {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLowest = -3.4028234663852886e38f;
// The running maximum is raised only when a score exceeds it by 2^8, so that the output is rescaled a few times per row
// (FlashAttention 4 has the same idea).
constexpr float kSlack = 8.0f;

// Warps of 32 rows read keys and values half as often as those of 16, which is what bounds the wider heads; biases, and
// the output of heads above 128, need the registers.
template <int kHead, bool kExtras>
struct Shape {
  static constexpr int kM = kTileRows, kN = kTileKeys;
  // Heads above 128 may find too little shared memory for two stages of keys and values: then one, or, 0, one buffer
  // for both in turn, as the device has it.
  static constexpr bool kTight = kHead > 128;
  static constexpr int kWarps = kExtras || kTight ? 8 : 4;
  // Queries stay in registers where there is room, and are read again for each tile otherwise.
  static constexpr bool kHeldQueries = !kTight && (kExtras || kHead <= 64);
  // Buffers for keys and for values. With one, the keys of a tile come under the softmax and the product with the
  // values of the tile before, and its values under its scores; two CTAs fit a multiprocessor then. The most there
  // can be where kTight.
  static constexpr int kStages = kHead <= 64 || kWarps == 8 ? 2 : 1;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kM / kWarps / 16;  // of 16 rows, a warp
  static constexpr int kChunks = kHead / 8;         // of 16 bytes, a row
  static constexpr int kStage = kN * kHead;         // elements
  static constexpr int SharedBytes(int stages) { return 2 * (kM * kHead + (stages == 0 ? 1 : 2 * stages) * kStage); }
  static constexpr int kCtas = kWarps == 8 && kHead > 64 ? 1 : 2;  // of a multiprocessor
};

// Where chunk c of a row lies: neighbours of a column of chunks fall into different banks.
template <int kHead>
__device__ __forceinline__ int Place(int row, int chunk) {
  return row * kHead + ((chunk ^ (kHead % 64 == 0 ? row & 7 : row >> 1 & 3)) << 3);
}
// The address of a chunk from that of chunk 0 or 1 of its row, `chunks` before it: an even number that the compiler
// knows, so that all chunks of a row take a few registers and otherwise constants.
template <int kHead>
__device__ __forceinline__ uint32_t Further(uint32_t address, int chunks) {
  constexpr int kPlaces = kHead % 64 == 0 ? 8 : 4;  // that chunks change with one another
  const auto turned = static_cast<uint32_t>(chunks % kPlaces), on = static_cast<uint32_t>(chunks) - turned;
  return (address ^ turned << 4) + (on << 4);
}

// Rows [first, first + kCount) of a head with `rows` rows of `size` elements into shared memory, zeros beyond either
// end. No state: what a thread could keep for the next tile is registers that the wide heads do not have.
template <int kHead, int kThreads, int kCount, typename T>
__device__ __forceinline__ void LoadRows(uint32_t to, const T* from, int64_t stride, int first, int rows, int size) {
  // What all threads know to be there needs no test of each chunk.
  const bool whole = size == kHead && first + kCount <= rows;
  constexpr int kChunks = kHead / 8;
  if constexpr (kThreads % (8 * kChunks) == 0) {
    // A chunk has the same place in its row in all steps.
    constexpr int kStep = kThreads / kChunks;  // rows between two of a thread
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
    const bool inside = 8 * chunk < size;
    const uint32_t place = to + 2 * static_cast<uint32_t>(Place<kHead>(row, chunk));
    const T* source = from + (first + row) * stride + 8 * chunk;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kCount / kStep; ++i) {
        CopyAsync16(place + 2 * i * kStep * kHead, source);
        source += kStep * stride;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount / kStep; ++i) {
      const bool valid = inside && first + row + i * kStep < rows;
      CopyAsync16(place + 2 * i * kStep * kHead, valid ? source : from, valid);
      source += kStep * stride;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount * kChunks / kThreads; ++i) {
      const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / kChunks, chunk = at % kChunks;
      const bool valid = first + row < rows && 8 * chunk < size;
      CopyAsync16(to + 2 * Place<kHead>(row, chunk), from + (valid ? (first + row) * stride + 8 * chunk : 0), valid);
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_SHAPE_CUH_
