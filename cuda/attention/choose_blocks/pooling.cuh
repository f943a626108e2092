// SPDX-License-Identifier: Apache-2.0
// The kernel that pools queries and keys: it averages neighbouring ones. It is limited by memory: it reads queries and
// keys once, and writes an eighth.
#ifndef STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_POOLING_CUH_
#define STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_POOLING_CUH_

#include "cuda/attention/choose_blocks/params.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma_sm90.cuh"
#include "plugins/core/contract/chosen_blocks.h"

namespace stof {
namespace cuda {
namespace choose {

constexpr int kPoolingThreads = 256;
constexpr int kItems = 8;  // elements of a thread, 16 bytes

// The mean of those of kCount rows, `stride` elements apart, whose bits in `rows` are 1; zeros where none is.
template <typename T, int kCount>
__device__ __forceinline__ uint4 Average(const T* from, int64_t stride, uint32_t rows, float sign) {
  float sum[kItems] = {};
  constexpr int kInFlight = kCount < 8 ? kCount : 8;
#pragma unroll
  for (int first = 0; first < kCount; first += kInFlight) {
    uint4 loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      loaded[i] = make_uint4(0, 0, 0, 0);
      if ((rows >> (first + i) & 1) != 0) loaded[i] = *reinterpret_cast<const uint4*>(from + (first + i) * stride);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t words[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = Unpack<T>(words[w]);
        sum[2 * w] += pair.x, sum[2 * w + 1] += pair.y;
      }
    }
  }
  const int count = __popc(rows);
  const float factor = count == 0 ? 0.0f : sign / static_cast<float>(count);
  return make_uint4(Pack<T>(sum[0] * factor, sum[1] * factor), Pack<T>(sum[2] * factor, sum[3] * factor),
                    Pack<T>(sum[4] * factor, sum[5] * factor), Pack<T>(sum[6] * factor, sum[7] * factor));
}

// The first `count` of 32 bits.
__device__ __forceinline__ uint32_t FirstBits(int64_t count) {
  return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1u;
}

// Which keys of a pooled key exist and are not padding.
__device__ __forceinline__ uint32_t KeysOfPooled(const BlockChoiceParams& p, int b, int pooled) {
  const AttentionParams& a = p.attention;
  const int64_t first = pooled * kPooledKeys;
  int64_t keys = a.T;
  if (p.first_rows != nullptr) keys = min(keys, int64_t{p.first_rows[b]} + p.key_offset);
  uint32_t rows = FirstBits(min(kPooledKeys, keys - first));
  if (a.pad_bits != nullptr && rows != 0) {
    const int words = (a.T + kTileKeys - 1) / kTileKeys * (kTileKeys / 32);
    rows &= a.pad_bits[static_cast<int64_t>(b) * words + first / 32] >> first % 32;
  }
  return rows;
}

// A group of kSize / 8 threads has a pooled query or key: first queries, then keys. A negative scale changes the
// sign of pooled queries, so that estimates need none.
template <typename T, int kSize>
__global__ void __launch_bounds__(kPoolingThreads) PoolQueriesAndKeys(const __grid_constant__ BlockChoiceParams p) {
  LetNextStart();
  WaitForPrevious();
  constexpr int kLanes = kSize / kItems;
  const AttentionParams& a = p.attention;
  const int d = static_cast<int>(threadIdx.x) % kLanes * kItems;
  const bool is_inside = d < a.D;  // D is a multiple of 8
  int64_t at = int64_t{blockIdx.x} * (kPoolingThreads / kLanes) + threadIdx.x / kLanes;
  const int64_t queries = int64_t{a.B} * a.G * p.query_rows, keys = int64_t{a.B} * a.G * p.key_rows;
  if (at < queries) {
    constexpr int kUnit = kBlockQueries / kPooledQueries;
    const int group = a.H / a.G;
    const auto bg = static_cast<int>(at / p.query_rows), row = static_cast<int>(at % p.query_rows);
    const int unit = row / kUnit, b = bg / a.G, h = bg % a.G * group + unit % group;
    const int64_t first = unit / group * kBlockQueries + row % kUnit * kPooledQueries;
    const uint32_t rows = is_inside ? FirstBits(min(kPooledQueries, a.S - first)) : 0u;
    const T* const from =
        static_cast<const T*>(a.query) + b * a.query_stride.b + h * a.query_stride.h + first * a.query_stride.s + d;
    T* const to = static_cast<T*>(p.pooled_queries) + at * kSize + d;
    *reinterpret_cast<uint4*>(to) =
        Average<T, static_cast<int>(kPooledQueries)>(from, a.query_stride.s, rows, a.scale < 0.0f ? -1.0f : 1.0f);
    return;
  }
  at -= queries;
  if (at >= keys) return;
  const auto bg = static_cast<int>(at / p.key_rows), pooled = static_cast<int>(at % p.key_rows);
  const int b = bg / a.G, g = bg % a.G;
  const uint32_t rows = KeysOfPooled(p, b, pooled);
  const T* const from = static_cast<const T*>(a.key) + b * a.key_stride.b + g * a.key_stride.h +
                        pooled * kPooledKeys * a.key_stride.s + d;
  T* const to = static_cast<T*>(p.pooled_keys) + at * kSize + d;
  *reinterpret_cast<uint4*>(to) =
      Average<T, static_cast<int>(kPooledKeys)>(from, a.key_stride.s, is_inside ? rows : 0u, 1.0f);
  if (g == 0 && d == 0) p.exists[int64_t{b} * p.key_rows + pooled] = rows != 0 ? 1 : 0;
}

}  // namespace choose
}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_CHOOSE_BLOCKS_POOLING_CUH_
