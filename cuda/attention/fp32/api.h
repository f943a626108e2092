// SPDX-License-Identifier: Apache-2.0
// Parameters and list of the attention kernels for fp32 tensors.
#ifndef STOF_CUDA_ATTENTION_FP32_API_H_
#define STOF_CUDA_ATTENTION_FP32_API_H_

#include "cuda/attention/params.h"

namespace stof {
namespace cuda {

// Keys and values as the kernel reads them: tiles of kTileKeys rows. A tile is a plane of high fp16 parts and, unless
// products have the error of TF32, one of low parts. It is in the order of shared memory, with zeros beyond T and the
// head size.
struct Fp32Params {
  AttentionParams attention;
  const void* key_tiles = nullptr;       // [B, G, tiles, planes, kTileKeys, head]
  const void* value_tiles = nullptr;     // the same
  const float* key_factors = nullptr;    // [B, G, tiles, kTileKeys]: key = (high + low) * factor
  const float* value_factors = nullptr;  // [B, G, tiles]: value = (high + low / 2^11) * factor
};

struct Fp32Kernel {
  int head = 0;    // elements of a row of the tiles; D and Dv fit it
  int planes = 0;  // 2: high and low parts; 1: high parts alone
  // score_mod: with softcap or a bias. Both launch on the stream.
  int (*split)(const Fp32Params& params, void* stream) = nullptr;
  int (*launch)(const Fp32Params& params, bool score_mod, void* stream) = nullptr;  // nullptr: no such kernel
};
// For the larger of D and Dv. exact: the error of fp32, else that of TF32.
Fp32Kernel FindFp32(int head_size, bool exact);

// Bytes of the tiles and factors, and their addresses in a workspace aligned to 16 bytes.
size_t Fp32WorkspaceBytes(const Fp32Kernel& kernel, const AttentionParams& params);
void PlaceFp32Workspace(const Fp32Kernel& kernel, void* memory, Fp32Params* params);

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_API_H_
