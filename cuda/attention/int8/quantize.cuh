// SPDX-License-Identifier: Apache-2.0
// The kernels that quantize the operands of an attention: queries and keys to int8, values to e4m3, transposed
// (docs/design/attention-8bit.md). They are limited by memory: they read queries and values once and keys twice.
#ifndef STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_
#define STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_

#include "cuda/attention/int8/convert.cuh"
#include "cuda/attention/int8/layout.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/math.h"

namespace stof {
namespace cuda {
namespace int8 {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // of a thread, 16 bytes of the inputs
constexpr int kQueriesOfCta = 64;
constexpr float kLeastScale = 0x1p-60f;  // so that no product of two scales is 0, which would make -inf a NaN
constexpr float kMostInt8 = 127.0f, kMostFp8 = 448.0f;

// Eight neighbours of a row.
template <typename T>
__device__ __forceinline__ void LoadColumns(const void* base, int64_t at, float (&x)[kColumns]) {
  const uint4 loaded = *reinterpret_cast<const uint4*>(static_cast<const T*>(base) + at);
  const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = Unpack<T>(words[w]);
    x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
  }
}

// Whether a key exists and is not padding. What padding holds changes no result.
__device__ __forceinline__ bool IsKey(const AttentionParams& p, int b, int key) {
  if (key >= p.T) return false;
  if (p.pad_bits == nullptr) return true;
  const int words = (p.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
  return (p.pad_bits[static_cast<int64_t>(b) * words + key / 32] >> key % 32 & 1) != 0;
}

// The largest magnitude of a thread's columns; NaN if there is one.
__device__ __forceinline__ float LargestOf(const float (&x)[kColumns]) {
  float most = 0.0f;
#pragma unroll
  for (int e = 0; e < kColumns; ++e) most = MaxOrNan(most, fabsf(x[e]));
  return most;
}

// Raises a number in shared memory, none of which is negative. Bits of a NaN are above all.
__device__ __forceinline__ void RaiseShared(float* to, float x) {
  atomicMax(reinterpret_cast<int*>(to), __float_as_int(x));
}

__device__ __forceinline__ uint2 PackInt8(const float (&x)[kColumns], float inverse) {
  uint32_t words[2] = {};
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
    words[e / 4] |= (static_cast<uint32_t>(__float2int_rn(x[e] * inverse)) & 0xffu) << e % 4 * 8;
  }
  return make_uint2(words[0], words[1]);
}

// Sums of the keys of a range, and how many there are. A CTA has one part of one head.
template <typename T, int kHead>
__global__ void __launch_bounds__(kThreads) SumKeys(const __grid_constant__ Int8Params params) {
  constexpr int kThreadsOfRow = kHead / kColumns, kRows = kThreads / kThreadsOfRow;
  __shared__ float sums[kRows][kHead + 1];
  LetNextStart();
  WaitForPrevious();
  const AttentionParams& p = params.attention;
  const int bg = static_cast<int>(blockIdx.x) / params.parts, part = static_cast<int>(blockIdx.x) % params.parts;
  const int b = bg / p.G, row = static_cast<int>(threadIdx.x) / kThreadsOfRow;
  const int column = static_cast<int>(threadIdx.x) % kThreadsOfRow * kColumns;
  const int keys = (p.T + params.parts - 1) / params.parts, first = part * keys, end = min(p.T, first + keys);
  const int64_t base = b * p.key_stride.b + bg % p.G * p.key_stride.h + column;
  float own[kColumns] = {}, count = 0.0f;
  for (int key = first + row; key < end; key += kRows) {
    if (!IsKey(p, b, key)) continue;
    float x[kColumns];
    LoadColumns<T>(p.key, base + key * p.key_stride.s, x);
#pragma unroll
    for (int e = 0; e < kColumns; ++e) own[e] += x[e];
    count += 1.0f;
  }
#pragma unroll
  for (int e = 0; e < kColumns; ++e) sums[row][column + e] = own[e];
  if (column == 0) sums[row][kHead] = count;
  __syncthreads();
  for (int d = static_cast<int>(threadIdx.x); d <= kHead; d += kThreads) {
    float sum = 0.0f;
    for (int i = 0; i < kRows; ++i) sum += sums[i][d];
    params.key_sums[static_cast<int64_t>(blockIdx.x) * (kHead + 1) + d] = sum;
  }
}

// A CTA's part of the quantization.
template <typename T, int kHead>
class Quantizer {
  static constexpr int kThreadsOfRow = kHead / kColumns, kRows = kThreads / kThreadsOfRow;
  static constexpr int kWordsOfTile = kInt8TileKeys / 4;  // words of four keys
  static_assert(kRows % 4 == 0 && kWordsOfTile % kRows == 0, "a thread's keys are of one group");

 public:
  struct Shared {
    float mean[kHead];
    float largest[kKeyGroups + 1];             // of every key group, and of the values
    uint32_t values[kHead][kWordsOfTile + 1];  // one more against bank conflicts
  };

  __device__ Quantizer(const Int8Params& params, Shared* shared)
      : params_(params), p_(params.attention), shared_(*shared) {
    row_ = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    column_ = static_cast<int>(threadIdx.x) % kThreadsOfRow * kColumns;
  }

  // Keys and values of KV tile `tile` of head bg of [B, G].
  __device__ void QuantizeTile(int bg, int tile) {
    ReadMean(bg);
    if (static_cast<int>(threadIdx.x) <= kKeyGroups) shared_.largest[threadIdx.x] = 0.0f;
    __syncthreads();
    const int b = bg / p_.G, g = bg % p_.G, key0 = tile * kInt8TileKeys;
    float x[kWords][4][kColumns];
    Load(p_.key, p_.key_stride, b, g, key0, true, x);
    float first = 0.0f, others = 0.0f;  // of the first eight keys of the tile, and of the others
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& most = KeyOf(w, i) < 8 ? first : others;
        most = MaxOrNan(most, LargestOf(x[w][i]));
      }
    }
    RaiseShared(&shared_.largest[KeyGroupOf(KeyOf(0, 0) % 8)], first);
    RaiseShared(&shared_.largest[KeyGroupOf(8 + KeyOf(0, 0) % 8)], others);
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = KeyOf(w, i);
        if (key0 + key >= p_.T) continue;
        const float scale = ScaleOf(shared_.largest[KeyGroupOf(key)], kMostInt8);
        *reinterpret_cast<uint2*>(params_.key + (static_cast<int64_t>(bg) * p_.T + key0 + key) * kHead + column_) =
            PackInt8(x[w][i], 1.0f / scale);
      }
    }
    if (params_.value != nullptr) QuantizeValues(b, g, tile, x);
    if (static_cast<int>(threadIdx.x) < kTileScales) {
      const int i = static_cast<int>(threadIdx.x);
      float scale = 1.0f;
      if (i < kKeyGroups) scale = ScaleOf(shared_.largest[i], kMostInt8);
      if (i == kValueScale && params_.value != nullptr) scale = ScaleOf(shared_.largest[i], kMostFp8);
      params_.tile_scales[(static_cast<int64_t>(bg) * params_.tiles + tile) * kTileScales + i] = scale;
    }
  }

  // kQueriesOfCta queries of head bh of [B, H].
  __device__ void QuantizeQueries(int bh, int row0) {
    const int b = bh / p_.H, h = bh % p_.H;
    const bool shifts = params_.query_shifts != nullptr;
    if (shifts) {
      ReadMean(b * p_.G + h / (p_.H / p_.G));
      __syncthreads();
    }
    const int64_t base = b * p_.query_stride.b + h * p_.query_stride.h + column_;
#pragma unroll
    for (int i = 0; i < kQueriesOfCta / kRows; ++i) {
      const int row = row0 + i * kRows + row_;
      float x[kColumns] = {};
      if (row < p_.S) LoadColumns<T>(p_.query, base + row * p_.query_stride.s, x);
      float most = LargestOf(x), shift = 0.0f;
#pragma unroll
      for (int e = 0; e < kColumns; ++e) shift += shifts ? x[e] * shared_.mean[column_ + e] : 0.0f;
#pragma unroll
      for (int lane = 1; lane < kThreadsOfRow; lane *= 2) {
        most = MaxOrNan(most, __shfl_xor_sync(~0u, most, lane));
        shift += __shfl_xor_sync(~0u, shift, lane);
      }
      if (row >= p_.S) continue;
      const float scale = ScaleOf(most, kMostInt8), factor = p_.scale * kLog2E;
      const int64_t at = static_cast<int64_t>(bh) * p_.S + row;
      *reinterpret_cast<uint2*>(params_.query + at * kHead + column_) = PackInt8(x, 1.0f / scale);
      if (column_ != 0) continue;
      params_.query_scales[at] = RaiseScale(scale * factor);
      if (shifts) params_.query_shifts[at] = shift * factor;
    }
  }

 private:
  static constexpr int kWords = kWordsOfTile / kRows;  // of a thread: four keys each

  // Key i of the four of this thread's word w: those whose scores a thread of the attention kernel has.
  __device__ __forceinline__ int KeyOf(int w, int i) const {
    const int word = row_ + w * kRows;
    return word / 4 * 16 + word % 4 * 2 + i / 2 * 8 + i % 2;
  }
  static __device__ __forceinline__ float RaiseScale(float scale) { return scale < kLeastScale ? kLeastScale : scale; }
  static __device__ __forceinline__ float ScaleOf(float largest, float most) { return RaiseScale(largest / most); }

  __device__ __forceinline__ void ReadMean(int bg) const {
    const float* const sums = params_.key_sums + static_cast<int64_t>(bg) * params_.parts * (kHead + 1);
    for (int d = static_cast<int>(threadIdx.x); d < kHead; d += kThreads) {
      float sum = 0.0f, count = 0.0f;
      for (int i = 0; i < params_.parts; ++i) {
        sum += sums[i * (kHead + 1) + d], count += sums[i * (kHead + 1) + kHead];
      }
      shared_.mean[d] = count > 0.0f ? sum / count : 0.0f;
    }
  }

  // This thread's part of a tile of keys, less their mean, or of values; zeros where there is no key.
  __device__ __forceinline__ void Load(const void* from, const Strides& stride, int b, int g, int key0, bool less_mean,
                                       float (&x)[kWords][4][kColumns]) const {
    const int64_t base = b * stride.b + g * stride.h + column_;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + KeyOf(w, i);
        const bool is_key = IsKey(p_, b, key);
        if (is_key) LoadColumns<T>(from, base + key * stride.s, x[w][i]);
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
          x[w][i][e] = is_key ? x[w][i][e] - (less_mean ? shared_.mean[column_ + e] : 0.0f) : 0.0f;
        }
      }
    }
  }

  // By way of shared memory: a thread has eight columns of four keys, memory has all keys of a column.
  __device__ __forceinline__ void QuantizeValues(int b, int g, int tile, float (&x)[kWords][4][kColumns]) {
    Load(p_.value, p_.value_stride, b, g, tile * kInt8TileKeys, false, x);
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) most = MaxOrNan(most, LargestOf(x[w][i]));
    }
    RaiseShared(&shared_.largest[kValueScale], most);
    __syncthreads();
    const float inverse = 1.0f / ScaleOf(shared_.largest[kValueScale], kMostFp8);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const int word = ValueColumnOf(KeyOf(w, 0)) / 4;
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        shared_.values[column_ + e][word] =
            PackFp8(x[w][0][e] * inverse, x[w][1][e] * inverse, x[w][2][e] * inverse, x[w][3][e] * inverse);
      }
    }
    __syncthreads();
    const int64_t stride = static_cast<int64_t>(params_.tiles) * kWordsOfTile;
    uint32_t* const to = reinterpret_cast<uint32_t*>(params_.value) +
                         (static_cast<int64_t>(b) * p_.G + g) * kHead * stride + tile * kWordsOfTile;
    for (int i = static_cast<int>(threadIdx.x); i < kHead * kWordsOfTile; i += kThreads) {
      to[i / kWordsOfTile * stride + i % kWordsOfTile] = shared_.values[i / kWordsOfTile][i % kWordsOfTile];
    }
  }

  const Int8Params& params_;
  const AttentionParams& p_;
  Shared& shared_;
  int row_, column_;
};

// The first key_ctas CTAs have a KV tile each, the others kQueriesOfCta queries.
template <typename T, int kHead>
__global__ void __launch_bounds__(kThreads) QuantizeOperands(const __grid_constant__ Int8Params params) {
  __shared__ typename Quantizer<T, kHead>::Shared shared;
  LetNextStart();
  WaitForPrevious();
  Quantizer<T, kHead> quantizer(params, &shared);
  const int cta = static_cast<int>(blockIdx.x);
  if (cta < params.key_ctas) {
    quantizer.QuantizeTile(cta / params.tiles, cta % params.tiles);
  } else {
    const int rows = (params.attention.S + kQueriesOfCta - 1) / kQueriesOfCta, i = cta - params.key_ctas;
    quantizer.QuantizeQueries(i / rows, i % rows * kQueriesOfCta);
  }
}

}  // namespace int8
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_
