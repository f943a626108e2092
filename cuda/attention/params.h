// SPDX-License-Identifier: Apache-2.0
// Between the backend (cuda/attention/job.h) and the CUDA kernels. Plain C++: no CUDA header, no framework type.
#ifndef STOF_CUDA_ATTENTION_PARAMS_H_
#define STOF_CUDA_ATTENTION_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "plugins/core/contract/attention.h"

namespace stof {
namespace cuda {

constexpr int kTileRows = 128;                          // m of every kernel here
constexpr int kTileKeys = 64;                           // n
constexpr int64_t kPiece = 64;                          // rows that share a word of AttentionParams::only
constexpr int64_t kMostMaskBytes = int64_t{128} << 20;  // of a mask that is made on the device in one piece

// A BlockMask in device memory, with the order in which rows are taken.
struct DeviceMask {
  int32_t rows = 0, layout_b = 1, layout_h = 1;
  int32_t mean_row = 0;  // entries of a row in the mean over the tables; 0: made on the device
  const int32_t* layout = nullptr;
  const int32_t* row_ptr = nullptr;  // row r has entries [row_ptr[r], row_end[r]), from full_begin[r] on full ones
  const int32_t* row_end = nullptr;
  const int32_t* full_begin = nullptr;
  const int32_t* key_tile = nullptr;
  const int32_t* bits_id = nullptr;  // of full tiles not to be read
  const uint32_t* bits = nullptr;    // [distinct, m, n / 32], or in the order of fragments.h, as MaskForm says
  const int32_t* order = nullptr;    // [tables, rows]: rows of a table by falling number of tiles
};

// What a kernel gets, by value. Strides count elements; pointers are device addresses.
struct AttentionParams {
  int32_t B = 0, H = 0, G = 0, S = 0, T = 0, D = 0, Dv = 0;
  const void* query = nullptr;
  const void* key = nullptr;
  const void* value = nullptr;
  void* output = nullptr;
  Strides query_stride, key_stride, value_stride, output_stride;
  float scale = 1.0f, softcap = 0.0f;
  int32_t empty_rows = 0;              // EmptyRows
  const uint32_t* pad_bits = nullptr;  // [B, key tiles, n / 32]; nullptr: no key is padded
  const void* bias = nullptr;
  int32_t bias_is_float = 0;  // else of the type of query
  int64_t bias_stride_b = 0, bias_stride_h = 0, bias_stride_q = 0, bias_stride_k = 0;
  const float* relative_bias = nullptr;
  int64_t relative_bias_size = 0, relative_bias_stride_h = 0;
  int32_t query_position = 0;
  const void* sink = nullptr;
  int32_t sink_is_float = 0;
  float* lse = nullptr;  // AttentionArgs::lse
  int64_t lse_stride_b = 0, lse_stride_h = 0;
  int32_t has_mask = 0;
  DeviceMask mask;
  const int32_t* only = nullptr;  // [B, H, ceil(S / 64)]: tiles without one stay as they are; nullptr: all count
};

// The launchers give a CUDA error code, 0 for none. stream is a cudaStream_t.
using Launch = int (*)(const AttentionParams& params, void* stream);
// By the larger of D and Dv, rounded up; bf16 or fp16; extras: softcap, a bias, or a scale <= 0.
Launch FindSm80(int head_size, bool bf16, bool extras);
// pad [batches, T] of any type that docs/reference/operators.md lists, to bits [B, key tiles, n / 32]. batches is B
// or 1. Sets `zeros` words at `cleared` to 0 on the way.
int LaunchPadBits(const void* pad, DType dtype, int64_t batches, int64_t B, int64_t T, uint32_t* bits, int32_t* cleared,
                  int64_t zeros, void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_PARAMS_H_
