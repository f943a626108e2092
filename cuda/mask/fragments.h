// SPDX-License-Identifier: Apache-2.0
// The order of a block mask's bits for kernels on tensor cores: every thread finds its bits of 64 keys in one word.
// Plain C++, for the host and the device.
//
// A warpgroup's accumulator of 64 rows (PTX ISA, wgmma, fragment of D): thread 32 w + 4 g + t has, of every block j of
// 8 columns, columns 8 j + 2 t + {0, 1} of rows 16 w + g (elements 4 j + {0, 1}) and 16 w + g + 8 (elements 4 j + {2,
// 3}). Its word has block j's elements in byte j % 4: bits 0 to 3 are the first row's of blocks 0 to 3 and 4 to 7, bits
// 4 to 7 the second row's. A tile's bits are [m / 64, FragmentWords(n), 128].
#ifndef STOF_CUDA_MASK_FRAGMENTS_H_
#define STOF_CUDA_MASK_FRAGMENTS_H_

#include <cstdint>

#include "cuda/common/host_device.h"

namespace stof {
namespace cuda {

STOF_HD constexpr int FragmentWords(int keys) { return (keys + 63) / 64; }
// Block of 8 columns and element of the block's 4 that a bit of a word is for.
STOF_HD constexpr int FragmentBlock(int bit) { return bit / 8 + bit / 2 % 2 * 4; }
STOF_HD constexpr int FragmentElement(int bit) { return bit / 4 % 2 * 2 + bit % 2; }
// A thread's word, of two words of 32 keys of each of its rows; t: the thread's number % 4.
STOF_HD constexpr uint32_t FragmentWord(uint32_t row0, uint32_t row0_high, uint32_t row1, uint32_t row1_high, int t) {
  return (row0 >> 2 * t & 0x03030303u) | (row0_high >> 2 * t & 0x03030303u) << 2 | (row1 >> 2 * t & 0x03030303u) << 4 |
         (row1_high >> 2 * t & 0x03030303u) << 6;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_FRAGMENTS_H_
