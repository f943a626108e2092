// SPDX-License-Identifier: Apache-2.0
// The kernels that quantize the operands of an attention: queries and keys to int8, values to e4m3, transposed
// (docs/design/attention-8bit.md). They are limited by memory: they read every operand once, and up to kMeanKeys keys
// of a head twice.
#ifndef STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_
#define STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_

#include "cuda/attention/int8/convert.cuh"
#include "cuda/attention/int8/layout.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/math.h"

namespace stof {
namespace cuda {
namespace int8 {

constexpr int kThreads = 256, kCtasPerSm = 3;
constexpr int kColumns = 8;  // of a thread, 16 bytes of the inputs
constexpr int kQueriesOfCta = 64;
// Keys of a head that are summed at most. Softmax does not change when one vector is subtracted from all keys, so a
// sample's mean will do.
constexpr int kMeanKeys = 1024;
constexpr float kLeastScale = 0x1p-60f;  // so that no product of two scales is 0, which would make -inf a NaN
constexpr float kMostInt8 = 127.0f, kMostFp8 = 448.0f;

// CTAs of a kernel. The first kernel has means, values and perhaps queries; the second, behind it, keys, and queries
// whose products with the means are wanted.
struct Grid {
  int mean_ctas = 0, tile_ctas = 0, query_ctas = 0;  // with a head's mean, with a KV tile, and with queries
  STOF_HD Grid(const Int8Params& params, bool is_second) {
    const AttentionParams& p = params.attention;
    const bool has_queries = is_second == (params.query_shifts != nullptr);
    mean_ctas = is_second ? 0 : p.B * p.G;
    tile_ctas = is_second || params.value != nullptr ? p.B * p.G * params.tiles : 0;
    query_ctas = has_queries ? p.B * p.H * ((p.S + kQueriesOfCta - 1) / kQueriesOfCta) : 0;
  }
  STOF_HD int ctas() const { return mean_ctas + tile_ctas + query_ctas; }
};

// Eight neighbours of a row, as they are in memory.
template <typename T>
__device__ __forceinline__ uint4 LoadColumns(const void* base, int64_t at) {
  return *reinterpret_cast<const uint4*>(static_cast<const T*>(base) + at);
}
template <typename T>
__device__ __forceinline__ void UnpackColumns(const uint4& loaded, float (&x)[kColumns]) {
  const uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float2 pair = Unpack<T>(words[w]);
    x[2 * w] = pair.x, x[2 * w + 1] = pair.y;
  }
}

// The number of keys of sequence b of [B].
__device__ __forceinline__ int CountKeys(const Int8Params& params, int b) {
  const int T = params.attention.T;
  return params.key_ends == nullptr ? T : max(0, min(T, params.key_ends[b]));
}

// Whether a key is one of the `keys` of its sequence and is not padding. What other rows hold changes no result.
__device__ __forceinline__ bool IsKey(const AttentionParams& p, int b, int keys, int key) {
  if (key >= keys) return false;
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

// Rounds to integers of at most 127 by a sum whose lowest byte is that of the integer: conversions are slower.
__device__ __forceinline__ uint2 PackInt8(const float (&x)[kColumns], float inverse) {
  uint32_t words[kColumns];
#pragma unroll
  for (int e = 0; e < kColumns; ++e) {
    words[e] = static_cast<uint32_t>(__float_as_int(__fmul_rn(x[e], inverse) + kInt8ZeroFloat));
  }
  return make_uint2(
      __byte_perm(__byte_perm(words[0], words[1], 0x0040), __byte_perm(words[2], words[3], 0x0040), 0x5410),
      __byte_perm(__byte_perm(words[4], words[5], 0x0040), __byte_perm(words[6], words[7], 0x0040), 0x5410));
}

__device__ __forceinline__ float RaiseScale(float scale) { return scale < kLeastScale ? kLeastScale : scale; }
__device__ __forceinline__ float ScaleOf(float largest) { return RaiseScale(largest / kMostInt8); }

// A CTA's part of the quantization.
template <typename T, int kHead>
class Quantizer {
  static constexpr int kThreadsOfRow = kHead / kColumns, kRows = kThreads / kThreadsOfRow;
  static constexpr int kWordsOfTile = kInt8TileKeys / 4;  // words of four keys
  static constexpr int kWords = kWordsOfTile / kRows;     // of a thread: four keys each
  static_assert(kRows % 4 == 0 && kWordsOfTile % kRows == 0, "a thread's keys are of one group");

 public:
  struct Shared {
    union {
      uint32_t values[kHead][kWordsOfTile];  // a column's keys, in the order of Place
      float sums[kRows][kHead + 1];          // of keys, and how many they are
    };
    float largest[kKeyGroups];  // of every key group, or of all values
  };

  __device__ Quantizer(const Int8Params& params, Shared* shared)
      : params_(params), p_(params.attention), shared_(*shared) {
    row_ = static_cast<int>(threadIdx.x) / kThreadsOfRow;
    column_ = static_cast<int>(threadIdx.x) % kThreadsOfRow * kColumns;
  }

  // The mean of keys of head bg of [B, G]: of all, or of kMeanKeys that are spread over them.
  __device__ void AverageKeys(int bg) {
    const int b = bg / p_.G, all = CountKeys(params_, b), keys = min(all, kMeanKeys);
    const int64_t base = b * p_.key_stride.b + bg % p_.G * p_.key_stride.h + column_;
    float own[kColumns] = {}, count = 0.0f;
    for (int first = row_; first < keys; first += kLoads * kRows) {
      uint4 loaded[kLoads];
      bool is_key[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = first + i * kRows;
        const int key = static_cast<int>(static_cast<int64_t>(at) * all / keys);
        is_key[i] = at < keys && IsKey(p_, b, all, key);
        loaded[i] = is_key[i] ? LoadColumns<T>(p_.key, base + key * p_.key_stride.s) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float x[kColumns];
        UnpackColumns<T>(loaded[i], x);
#pragma unroll
        for (int e = 0; e < kColumns; ++e) own[e] += x[e];
        count += is_key[i] ? 1.0f : 0.0f;
      }
    }
#pragma unroll
    for (int e = 0; e < kColumns; ++e) shared_.sums[row_][column_ + e] = own[e];
    if (column_ == 0) shared_.sums[row_][kHead] = count;
    __syncthreads();
    for (int d = static_cast<int>(threadIdx.x); d < kHead; d += kThreads) {
      float sum = 0.0f, summed = 0.0f;
      for (int i = 0; i < kRows; ++i) sum += shared_.sums[i][d], summed += shared_.sums[i][kHead];
      params_.key_means[static_cast<int64_t>(bg) * kHead + d] = summed > 0.0f ? sum / summed : 0.0f;
    }
  }

  // Keys of KV tile `tile` of head bg of [B, G].
  __device__ void QuantizeKeys(int bg, int tile) {
    const int b = bg / p_.G, key0 = tile * kInt8TileKeys;
    if (IsSkipped(b, key0)) return;
    uint4 loaded[kWords][4];
    const uint32_t is_key = Load(p_.key, p_.key_stride, b, bg % p_.G, key0, loaded);
    float mean[kColumns];
    ReadMean(bg, mean);
    if (static_cast<int>(threadIdx.x) < kKeyGroups) shared_.largest[threadIdx.x] = 0.0f;
    __syncthreads();
    float first = 0.0f, others = 0.0f;  // of the first eight keys of the tile, and of the others
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[kColumns];
        SubtractMean(loaded[w][i], (is_key >> (4 * w + i) & 1) != 0, mean, x);
        float& most = KeyOf(w, i) < 8 ? first : others;
        most = MaxOrNan(most, LargestOf(x));
      }
    }
    first = LargestOfRow(first), others = LargestOfRow(others);
    if (column_ == 0) {
      RaiseShared(&shared_.largest[KeyGroupOf(KeyOf(0, 0) % 8)], first);
      RaiseShared(&shared_.largest[KeyGroupOf(8 + KeyOf(0, 0) % 8)], others);
    }
    __syncthreads();
    const float inverse_first = 1.0f / ScaleOf(shared_.largest[KeyGroupOf(KeyOf(0, 0) % 8)]);
    const float inverse_others = 1.0f / ScaleOf(shared_.largest[KeyGroupOf(8 + KeyOf(0, 0) % 8)]);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = KeyOf(w, i);
        if (key0 + key >= p_.T) continue;
        float x[kColumns];
        SubtractMean(loaded[w][i], (is_key >> (4 * w + i) & 1) != 0, mean, x);
        *reinterpret_cast<uint2*>(params_.key + (static_cast<int64_t>(bg) * p_.T + key0 + key) * kHead + column_) =
            PackInt8(x, key < 8 ? inverse_first : inverse_others);
      }
    }
    if (static_cast<int>(threadIdx.x) < kKeyGroups) {
      TileScales(bg, tile)[threadIdx.x] = ScaleOf(shared_.largest[threadIdx.x]);
    }
  }

  // Values of KV tile `tile` of head bg of [B, G]. By way of shared memory: a thread has eight columns of four keys,
  // memory has all keys of a column.
  __device__ void QuantizeValues(int bg, int tile) {
    if (IsSkipped(bg / p_.G, tile * kInt8TileKeys)) return;
    uint4 loaded[kWords][4];
    Load(p_.value, p_.value_stride, bg / p_.G, bg % p_.G, tile * kInt8TileKeys, loaded);
    if (threadIdx.x == 0) shared_.largest[0] = 0.0f;
    __syncthreads();
    float most = 0.0f;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x[kColumns];
        UnpackColumns<T>(loaded[w][i], x);
        most = MaxOrNan(most, LargestOf(x));
      }
    }
    most = LargestOfRow(most);
    if (column_ == 0) RaiseShared(&shared_.largest[0], most);
    __syncthreads();
    most = shared_.largest[0];
    const bool is_finite = most < INFINITY;  // or the tile is NaN
    const float scale = is_finite ? RaiseScale(most / kMostFp8) : 1.0f;
    const float inverse = is_finite ? 1.0f / scale : NAN;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      float x[4][kColumns];
#pragma unroll
      for (int i = 0; i < 4; ++i) UnpackColumns<T>(loaded[w][i], x[i]);
      const int word = ValueColumnOf(KeyOf(w, 0)) / 4;
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        shared_.values[column_ + e][Place(column_, word)] =
            PackFp8(x[0][e] * inverse, x[1][e] * inverse, x[2][e] * inverse, x[3][e] * inverse);
      }
    }
    __syncthreads();
    const int64_t stride = static_cast<int64_t>(params_.tiles) * kInt8TileKeys;
    uint8_t* const to = params_.value + bg * kHead * stride + static_cast<int64_t>(tile) * kInt8TileKeys;
    constexpr int kChunks = kWordsOfTile / 4;  // 16 bytes each
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kHead * kChunks; i += kThreads) {
      const int d = i / kChunks, column = d / kColumns * kColumns;
      uint4 chunk = *reinterpret_cast<const uint4*>(&shared_.values[d][Place(column, i % kChunks * 4) / 4 * 4]);
      // From column 64 on, Place swaps the first and the last eight bytes of a chunk.
      if (column >= 64) chunk = uint4{chunk.z, chunk.w, chunk.x, chunk.y};
      *reinterpret_cast<uint4*>(to + d * stride + i % kChunks * 16) = chunk;
    }
    if (threadIdx.x == 0) TileScales(bg, tile)[kValueScale] = scale;
  }

  // kQueriesOfCta queries of head bh of [B, H].
  __device__ void QuantizeQueries(int bh, int row0) {
    constexpr int kCount = kQueriesOfCta / kRows;
    const int b = bh / p_.H, h = bh % p_.H;
    const bool shifts = params_.query_shifts != nullptr;
    const int64_t base = b * p_.query_stride.b + h * p_.query_stride.h + column_;
    uint4 loaded[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * kRows + row_;
      loaded[i] = row < p_.S ? LoadColumns<T>(p_.query, base + row * p_.query_stride.s) : uint4{0, 0, 0, 0};
    }
    float mean[kColumns] = {};
    if (shifts) ReadMean(b * p_.G + h / (p_.H / p_.G), mean);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int row = row0 + i * kRows + row_;
      float x[kColumns];
      UnpackColumns<T>(loaded[i], x);
      const float scale = ScaleOf(LargestOfRow(LargestOf(x))), factor = p_.scale * kLog2E;
      float shift = 0.0f;
      if (shifts) {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) shift += x[e] * mean[e];
#pragma unroll
        for (int lane = 1; lane < kThreadsOfRow; lane *= 2) shift += __shfl_xor_sync(~0u, shift, lane);
      }
      if (row >= p_.S) continue;
      const int64_t at = static_cast<int64_t>(bh) * p_.S + row;
      *reinterpret_cast<uint2*>(params_.query + at * kHead + column_) = PackInt8(x, 1.0f / scale);
      if (column_ != 0) continue;
      params_.query_scales[at] = RaiseScale(scale * factor);
      if (shifts) params_.query_shifts[at] = shift * factor;
    }
  }

 private:
  static constexpr int kLoads = 8;  // of a thread that sums keys, in flight

  // Whether a tile from this key on is one that no query reads.
  __device__ __forceinline__ bool IsSkipped(int b, int key0) const {
    return params_.skips_tiles && key0 >= CountKeys(params_, b);
  }
  // Key i of the four of this thread's word w: those whose scores a thread of the attention kernel has.
  __device__ __forceinline__ int KeyOf(int w, int i) const {
    const int word = row_ + w * kRows;
    return word / 4 * 16 + word % 4 * 2 + i / 2 * 8 + i % 2;
  }
  // Where a word of a column is in shared memory: the lanes of a warp write to 32 banks, and eight lanes read a
  // column's 16-byte chunks.
  static __device__ __forceinline__ int Place(int column, int word) {
    const int lane = column / kColumns;
    return ((word / 4 ^ lane % 8) * 4 | word % 4) ^ lane / 8 * 2;
  }
  static __device__ __forceinline__ float LargestOfRow(float most) {
#pragma unroll
    for (int lane = 1; lane < kThreadsOfRow; lane *= 2) most = MaxOrNan(most, __shfl_xor_sync(~0u, most, lane));
    return most;
  }
  __device__ __forceinline__ float* TileScales(int bg, int tile) const {
    return params_.tile_scales + (static_cast<int64_t>(bg) * params_.tiles + tile) * kTileScales;
  }
  __device__ __forceinline__ void ReadMean(int bg, float (&mean)[kColumns]) const {
    const float4* const from =
        reinterpret_cast<const float4*>(params_.key_means + static_cast<int64_t>(bg) * kHead + column_);
    const float4 low = from[0], high = from[1];
    mean[0] = low.x, mean[1] = low.y, mean[2] = low.z, mean[3] = low.w;
    mean[4] = high.x, mean[5] = high.y, mean[6] = high.z, mean[7] = high.w;
  }
  static __device__ __forceinline__ void SubtractMean(const uint4& loaded, bool is_key, const float (&mean)[kColumns],
                                                      float (&x)[kColumns]) {
    UnpackColumns<T>(loaded, x);
#pragma unroll
    for (int e = 0; e < kColumns; ++e) x[e] = is_key ? x[e] - mean[e] : 0.0f;
  }

  // This thread's part of a tile of keys or values; zeros where there is no key. Gives a bit for each that is one.
  __device__ __forceinline__ uint32_t Load(const void* from, const Strides& stride, int b, int g, int key0,
                                           uint4 (&loaded)[kWords][4]) const {
    const int64_t base = b * stride.b + g * stride.h + column_;
    const int keys = CountKeys(params_, b);
    uint32_t is_key = 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = key0 + KeyOf(w, i);
        const bool exists = IsKey(p_, b, keys, key);
        loaded[w][i] = exists ? LoadColumns<T>(from, base + key * stride.s) : uint4{0, 0, 0, 0};
        is_key |= exists ? 1u << (4 * w + i) : 0u;
      }
    }
    return is_key;
  }

  const Int8Params& params_;
  const AttentionParams& p_;
  Shared& shared_;
  int row_, column_;
};

// One of the two kernels: a CTA has a head's mean, a KV tile of values or of keys, or kQueriesOfCta queries.
template <typename T, int kHead, bool kIsSecond>
__global__ void __launch_bounds__(kThreads, kCtasPerSm) QuantizeOperands(const __grid_constant__ Int8Params params) {
  __shared__ typename Quantizer<T, kHead>::Shared shared;
  LetNextStart();
  WaitForPrevious();
  Quantizer<T, kHead> quantizer(params, &shared);
  const Grid grid(params, kIsSecond);
  int cta = static_cast<int>(blockIdx.x);
  if (!kIsSecond && cta < grid.mean_ctas) {
    quantizer.AverageKeys(cta);
    return;
  }
  cta -= grid.mean_ctas;
  if (cta < grid.tile_ctas) {
    if constexpr (kIsSecond) {
      quantizer.QuantizeKeys(cta / params.tiles, cta % params.tiles);
    } else {
      quantizer.QuantizeValues(cta / params.tiles, cta % params.tiles);
    }
    return;
  }
  const int rows = (params.attention.S + kQueriesOfCta - 1) / kQueriesOfCta, i = cta - grid.tile_ctas;
  quantizer.QuantizeQueries(i / rows, i % rows * kQueriesOfCta);
}

}  // namespace int8
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_INT8_QUANTIZE_CUH_
