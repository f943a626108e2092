// SPDX-License-Identifier: Apache-2.0
// Scales of queries and keys in int8 in the sm_80 kernel. Member functions of Sm80Attention; kernel.cuh includes this
// file behind the class.
#ifndef STOF_CUDA_ATTENTION_SM80_INT8_CUH_
#define STOF_CUDA_ATTENTION_SM80_INT8_CUH_

#include "cuda/attention/int8/layout.h"
#include "cuda/attention/sm80/kernel.cuh"

namespace stof {
namespace cuda {

// The scales of the CTA's queries, with the scale of the scores and log2(e), to shared memory: registers lack room.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::LoadQueryScales() const {
  static_assert(S::kM <= S::kThreads, "a thread has at most one query");
  const int thread = static_cast<int>(threadIdx.x), row = row0_ + thread;
  if (thread >= S::kM) return;
  const bool is_query = row < p_.S;
  const float scale = is_query ? this->int8.query[(static_cast<int64_t>(b_) * p_.H + h_) * p_.S + row] : 1.0f;
  reinterpret_cast<float*>(shared_ + I::kQueryScales / 2)[thread] = scale;
}

// The scales of the KV tile, which is a half of a tile of the quantization.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::FetchTileScales(int tile,
                                                                                                    uint32_t to) const {
  static_assert(kInt8TileKeys == 2 * S::kN && kKeyGroups % 4 == 0 && kTileScales % 4 == 0, "copies of 16 bytes");
  const int at = 4 * static_cast<int>(threadIdx.x);
  const int64_t from = static_cast<int64_t>(scale_tile_ + tile / 2) * kTileScales + at;
  if (at < kKeyGroups) CopyAsync16(to + 4 * at, this->int8.tile + from);
}

// Sums of products, which kInt8ZeroFloat was added to, to scores in units of log2. Of every eight keys a thread has
// two, of one key group; the first eight keys of a tile of the quantization have groups of their own.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ void Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::Dequantize(
    int tile, uint32_t keys, float (&s)[S::kBlocks][kColumns][4]) const {
  const uint32_t scales = keys + I::kScales;
  const int key = lane_ % 4 * 2;
  const float others = LoadSharedFloat(scales + 4 * KeyGroupOf(8 + key));
  const float first = tile % 2 == 0 ? LoadSharedFloat(scales + 4 * KeyGroupOf(key)) : others;
#pragma unroll
  for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float query_scale = LoadSharedFloat(base_ + I::kQueryScales + 4 * Row(i, r));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float scale = query_scale * (j == 0 ? first : others);
        // Less than one unit of the sums is rounded away.
        const float zero = scale * kInt8ZeroFloat;
        s[i][j][2 * r] = s[i][j][2 * r] * scale - zero;
        s[i][j][2 * r + 1] = s[i][j][2 * r + 1] * scale - zero;
      }
    }
  }
}

// What the scores of a row lack, in units of log2: its query times the mean of the keys. The LSE and the sink want it.
template <int kHead, typename T, bool kScoreMod, int kRows, Sm80Scores kScores>
__device__ __forceinline__ float Sm80Attention<kHead, T, kScoreMod, kRows, kScores>::ShiftOf(int row) const {
  const bool is_wanted = this->int8.shifts != nullptr && row0_ + row < p_.S;
  return is_wanted ? this->int8.shifts[(static_cast<int64_t>(b_) * p_.H + h_) * p_.S + row0_ + row] : 0.0f;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_SM80_INT8_CUH_
