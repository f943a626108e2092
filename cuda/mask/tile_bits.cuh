// SPDX-License-Identifier: Apache-2.0
// Element mask and key padding of a partial tile for a warp that computes its scores with mma.sync: for the sm80 and
// fp32 kernels. A warp's accumulator of 16 rows has the layout of a warpgroup's accumulator of 64 rows, so that bits
// have the same order (fragments.h): one word for a thread's elements of 16 rows and 64 keys.
#ifndef STOF_CUDA_MASK_TILE_BITS_CUH_
#define STOF_CUDA_MASK_TILE_BITS_CUH_

#include <cuda_runtime.h>

#include "cuda/common/mma_sm80.cuh"
#include "cuda/mask/fragments.h"
#include "cuda/mask/mask_params.h"

namespace stof {
namespace cuda {

// A thread's bits of kBlocks times 16 rows of a tile.
template <int kBlocks>
class TileBits {
 public:
  // Whether any element is masked.
  static __device__ __forceinline__ bool Some(int id, const uint32_t (&pad)[2]) {
    return id >= 0 || (pad[0] & pad[1]) != ~0u;
  }

  // Loads the bits. bits: those of all tiles; id: the tile's, negative: a full tile; block: the warp's first block of
  // 16 rows in the tile.
  __device__ __forceinline__ void Fetch(const uint32_t* bits, int id, int block, int lane) {
    // Not a pointer that may be null: ptxas 13.0 compares it with zero sooner than the zero arrives
    // (docs/lab/cuda-experiments.md, "Defects of compilers and runtimes").
    const uint32_t* const from = bits + static_cast<int64_t>(max(id, 0)) * kWords + block * 32 + lane;
    if (id < 0) return;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      uint32_t own[1];
      LoadConstant(own, from + 32 * i);
      word_[i] = own[0];
    }
  }

  // Takes away what the tile or its padding forbids; pad: a bit for every key.
  template <int kColumns>
  __device__ __forceinline__ void Forbid(int id, const uint32_t (&pad)[2], int lane,
                                         float (&s)[kBlocks][kColumns][4]) const {
    static_assert(8 * kColumns == kTileKeys, "a word has a bit for each of a thread's scores");
    const uint32_t keys = FragmentWord(pad[0], pad[1], pad[0], pad[1], lane % 4);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const uint32_t word = id < 0 ? keys : keys & word_[i];
#pragma unroll
      for (int bit = 0; bit < 32; ++bit) {
        if ((word & 1u << bit) == 0) s[i][FragmentBlock(bit)][FragmentElement(bit)] = -INFINITY;
      }
    }
  }

 private:
  static constexpr int kWords = kTileRows / 16 * 32;  // of a tile
  uint32_t word_[kBlocks];
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_TILE_BITS_CUH_
