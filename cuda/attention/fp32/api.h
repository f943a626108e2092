// SPDX-License-Identifier: Apache-2.0
// Between the backend and the kernels for fp32 tensors.
#ifndef STOF_CUDA_ATTENTION_FP32_API_H_
#define STOF_CUDA_ATTENTION_FP32_API_H_

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

// Keys and values as the kernel reads them: tiles of kTileKeys rows, each a plane of high halves and, unless rounded as
// TF32 is, one of low halves (fp16), in the order of shared memory, zeros beyond T and the head size.
struct Fp32Params {
  AttentionParams attention;
  const void* key_tiles = nullptr;       // [B, G, tiles, planes, kTileKeys, head]
  const void* value_tiles = nullptr;     // the same
  const float* key_factors = nullptr;    // [B, G, tiles, kTileKeys]: key = (high + low) * factor
  const float* value_factors = nullptr;  // [B, G, tiles]: value = (high + low / 2^11) * factor
};

struct Fp32Kernel {
  int head = 0;    // elements of a row of the tiles; D and Dv fit it
  int planes = 0;  // 2, or 1 for products of the high halves alone
  // extras: softcap or a bias. Both queue their work on the stream.
  int (*split)(const Fp32Params& params, void* stream) = nullptr;
  int (*launch)(const Fp32Params& params, bool score_mod, void* stream) = nullptr;  // nullptr: no such kernel
};
// By the larger of D and Dv. exact: with fp32's error; else with that of TF32.
Fp32Kernel FindFp32(int head_size, bool exact);

// Bytes that the tiles and factors take, and their places in such memory, which is aligned to 16 bytes.
size_t Fp32WorkspaceBytes(const Fp32Kernel& kernel, const AttentionParams& params);
void PlaceFp32Workspace(const Fp32Kernel& kernel, void* memory, Fp32Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_API_H_
