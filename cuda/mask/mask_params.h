// SPDX-License-Identifier: Apache-2.0
// A block mask as kernels read it. Plain C++: no CUDA header, no framework type.
#ifndef STOF_CUDA_MASK_MASK_PARAMS_H_
#define STOF_CUDA_MASK_MASK_PARAMS_H_

#include <cstdint>

namespace stof {
namespace cuda {

constexpr int kTileRows = 128;                          // m: queries of a tile of the sm_80 and fp32 kernels
constexpr int kTileKeys = 64;                           // n: keys of a tile
constexpr int64_t kMostMaskBytes = int64_t{128} << 20;  // of a mask that a kernel builds

// A BlockMask in device memory, with an order of its tile rows.
struct DeviceMask {
  int32_t rows = 0, layout_b = 1, layout_h = 1;
  int32_t mean_row = 0;  // entries of a tile row, in the mean over the tables; 0: built on the device
  const int32_t* layout = nullptr;
  const int32_t* row_ptr = nullptr;  // tile row r has entries [row_ptr[r], row_end[r]), full ones from full_begin[r] on
  const int32_t* row_end = nullptr;
  const int32_t* full_begin = nullptr;
  const int32_t* key_tile = nullptr;
  const int32_t* bits_id = nullptr;  // undefined for full tiles
  const uint32_t* bits = nullptr;    // [element masks, m, n / 32], or in the order of fragments.h: MaskForm::fragments
  const int32_t* order = nullptr;    // [tables, rows]: tile rows of a table, most tiles first
};

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_MASK_MASK_PARAMS_H_
