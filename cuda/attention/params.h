// SPDX-License-Identifier: Apache-2.0
// Parameters of the attention kernels, set by cuda/attention/job.h. Plain C++: no CUDA header, no framework type.
#ifndef STOF_CUDA_ATTENTION_PARAMS_H_
#define STOF_CUDA_ATTENTION_PARAMS_H_

#include <cstddef>
#include <cstdint>

#include "cuda/mask/mask_params.h"
#include "plugins/core/contract/attention.h"

namespace stof {
namespace cuda {

constexpr int64_t kRowsPerFlag = 64;  // query rows a flag of AttentionParams::only_flagged stands for

// Passed to kernels by value. Strides count elements; pointers are device addresses. It is flat: with the parts of
// AttentionArgs as members, the decode kernels get other registers and loads.
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
  int32_t bias_is_float = 0;  // else it has the type of query
  int64_t bias_stride_b = 0, bias_stride_h = 0, bias_stride_q = 0, bias_stride_k = 0;
  const float* relative_bias = nullptr;
  int64_t relative_bias_size = 0, relative_bias_stride_h = 0;
  int32_t query_position = 0;
  const void* sink = nullptr;
  int32_t sink_is_float = 0;
  float* lse = nullptr;  // AttentionOutput::lse
  int64_t lse_stride_b = 0, lse_stride_h = 0;
  int32_t has_mask = 0;
  DeviceMask mask;
  const int32_t* only_flagged = nullptr;  // [B, H, ceil(S / 64)] flags: only flagged rows are computed; nullptr: all
};

// Packs a key padding mask [batches, T] of any type that docs/reference/operators.md lists into bits [B, key tiles,
// n / 32]. batches is B or 1. Also sets `zeros` words at `cleared` to 0. Gives a CUDA error code, 0 for none. stream is
// a cudaStream_t.
int LaunchPadBits(const void* pad, DType dtype, int64_t batches, int64_t B, int64_t T, uint32_t* bits, int32_t* cleared,
                  int64_t zeros, void* stream);

// Clears the flags [B, H, ceil(S / 64)] of 64 query rows none of which exists. existence_bias [B, S], whose rows are
// `stride` apart: 0 where a query exists. Gives a CUDA error code, 0 for none. stream is a cudaStream_t.
int LaunchClearFlags(const float* existence_bias, int64_t stride, int64_t B, int64_t H, int64_t S, int32_t* flags,
                     void* stream);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_PARAMS_H_
