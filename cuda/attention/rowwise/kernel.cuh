// SPDX-License-Identifier: Apache-2.0
// Row-wise attention for sparse masks of scattered keys, compute capability 8.0 and later. A warp computes one query
// and reads only its allowed keys, so that a tile costs what its pairs cost. Groups of lanes read a key each, 16 bytes
// a lane. Each group has an online softmax of its own; they are combined at the end.
//
// The kernel reads the same block mask as the others. A warp turns the words of its row in 32 tiles into a queue of
// keys and processes it. Sums are in fp32, and weights are not rounded.
#ifndef STOF_CUDA_ATTENTION_ROWWISE_KERNEL_CUH_
#define STOF_CUDA_ATTENTION_ROWWISE_KERNEL_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/splitkv.cuh"
#include "cuda/attention/rowwise/api.h"

namespace stof {
namespace cuda {

// kLanes: lanes that read a key. kChunks: loads of 16 bytes of a lane for it.
template <typename T, int kLanes, int kChunks>
struct RowwiseShape {
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kPerLoad = 16 / static_cast<int>(sizeof(T));  // elements of a load
  static constexpr int kOwn = kPerLoad * kChunks;                    // elements of a lane
  static constexpr int kGroups = 32 / kLanes;                        // keys at once
  static constexpr int kUnroll = 4;                                  // of these, whose loads are in flight together
  static constexpr int kQueue = 32 * kRowwiseTile;                   // the keys of 32 tiles
};

__device__ __forceinline__ void ToFloats(const uint4& from, float (&to)[4], const float*) {
  to[0] = __uint_as_float(from.x), to[1] = __uint_as_float(from.y);
  to[2] = __uint_as_float(from.z), to[3] = __uint_as_float(from.w);
}
__device__ __forceinline__ void ToFloats(const uint4& from, float (&to)[8], const __half*) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void ToFloats(const uint4& from, float (&to)[8], const __nv_bfloat16*) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = __uint_as_float(words[i] << 16), to[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

template <typename T, int kLanes, int kChunks, bool kScoreMod>
class RowwiseAttention {
  using S = RowwiseShape<T, kLanes, kChunks>;

 public:
  __device__ RowwiseAttention(const AttentionParams& p, int b, int h, int row, uint16_t* queue)
      : p_(p), b_(b), h_(h), row_(row), queue_(queue) {
    lane_ = static_cast<int>(threadIdx.x) % 32;
    group_ = lane_ / kLanes;
    const int g = h / (p.H / p.G);
    key_ = static_cast<const T*>(p.key) + b * p.key_stride.b + g * p.key_stride.h;
    value_ = static_cast<const T*>(p.value) + b * p.value_stride.b + g * p.value_stride.h;
    const T* query = static_cast<const T*>(p.query) + b * p.query_stride.b + h * p.query_stride.h +
                     static_cast<int64_t>(row) * p.query_stride.s;
    const float scale = kScoreMod ? p.scale : p.scale * kLog2E;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      float own[S::kPerLoad];
      ToFloats(Load(query, c, p.D, true), own, query);
#pragma unroll
      for (int e = 0; e < S::kPerLoad; ++e) query_[c * S::kPerLoad + e] = own[e] * scale;
    }
  }

  __device__ void Run() {
    Clear();
    ProcessMask();
    float top = 0.0f;
    float total = CombineGroups(&top);
    if (p_.lse != nullptr && lane_ == 0) {
      StoreLse<T>(p_, b_, h_, row_, top, total == 0.0f ? 0.0f : total + SinkWeight<T>(p_, h_, top));
    }
    const auto policy = static_cast<EmptyRows>(p_.empty_rows);
    if (total == 0.0f && (policy == EmptyRows::kMean || policy == EmptyRows::kAll) && p_.T > 0) {
      Clear();
      mean_ = policy == EmptyRows::kMean;
      // All keys: the queue is that of a full tile.
      for (int i = lane_; i < kRowwiseTile; i += 32) queue_[i] = static_cast<uint16_t>(i);
      __syncwarp();
      for (int key0 = 0; key0 < p_.T; key0 += kRowwiseTile) {
        tile_ = key0 / kRowwiseTile;
        ProcessQueue(min(kRowwiseTile, p_.T - key0));
      }
      total = CombineGroups(&top);
    }
    const bool empty = total == 0.0f;
    const float normalizer = empty ? 1.0f : 1.0f / (total + SinkWeight<T>(p_, h_, top));
    T* const to = static_cast<T*>(p_.output) + b_ * p_.output_stride.b + h_ * p_.output_stride.h +
                  static_cast<int64_t>(row_) * p_.output_stride.s;
    if (group_ != 0) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const int d = Element(c);
      if (d >= p_.Dv) continue;
#pragma unroll
      for (int e = 0; e < S::kPerLoad; ++e) {
        to[d + e] = FromFloat<T>(empty ? EmptyValue(p_) : sum_[c * S::kPerLoad + e] * normalizer);
      }
    }
  }

 private:
  __device__ __forceinline__ int Element(int c) const { return S::kPerLoad * (c * kLanes + lane_ % kLanes); }
  __device__ __forceinline__ uint4 Load(const T* row, int c, int size, bool valid) const {
    const int d = Element(c);
    return valid && d < size ? __ldg(reinterpret_cast<const uint4*>(row + d)) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void Clear() {
    max_ = -INFINITY;
    weights_ = 0.0f;
#pragma unroll
    for (int i = 0; i < S::kOwn; ++i) sum_[i] = 0.0f;
  }

  // Processes all keys that mask and padding allow, 32 tiles at a time. Each lane looks at one tile, as dependent loads
  // of one tile after the other would be slow.
  __device__ void ProcessMask() {
    const int tiles = (p_.T + kRowwiseTile - 1) / kRowwiseTile;
    const bool padded = p_.pad_bits != nullptr, masked = p_.has_mask != 0;
    const uint32_t* pad = p_.pad_bits + static_cast<int64_t>(b_) * tiles * 2;
    int begin = 0, full = 0, end = tiles;
    if (masked) {
      const DeviceMask& mask = p_.mask;
      const int table = mask.layout[(mask.layout_b == 1 ? 0 : b_) * mask.layout_h + (mask.layout_h == 1 ? 0 : h_)];
      const int at = table * mask.rows + row_ / kRowwiseTile;
      begin = mask.row_ptr[at], full = mask.full_begin[at], end = mask.row_end[at];
    }
    for (int first = begin; first < end; first += 32) {
      const int at = first + lane_;
      uint32_t words[2] = {0, 0};
      if (at < end) {
        tile_ = masked ? p_.mask.key_tile[at] : at;
        words[0] = words[1] = ~0u;
        if (masked && at < full) {
          const uint2 own = __ldg(reinterpret_cast<const uint2*>(p_.mask.bits) +
                                  static_cast<int64_t>(p_.mask.bits_id[at]) * kRowwiseTile + row_ % kRowwiseTile);
          words[0] = own.x, words[1] = own.y;
        } else if ((tile_ + 1) * kRowwiseTile > p_.T) {
          const int keys = p_.T - tile_ * kRowwiseTile;
          words[0] = keys >= 32 ? ~0u : (1u << keys) - 1u;
          words[1] = keys <= 32 ? 0u : (1u << (keys - 32)) - 1u;
        }
        if (padded) words[0] &= pad[2 * tile_], words[1] &= pad[2 * tile_ + 1];
      }
      const int own = __popc(words[0]) + __popc(words[1]);
      int behind = own;  // keys of this lane and those before it
#pragma unroll
      for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int before = __shfl_up_sync(~0u, behind, lanes);
        if (lane_ >= lanes) behind += before;
      }
      int to = behind - own;
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        for (uint32_t left = words[w]; left != 0; left &= left - 1) {
          queue_[to++] = static_cast<uint16_t>(lane_ * kRowwiseTile + 32 * w + __ffs(static_cast<int>(left)) - 1);
        }
      }
      __syncwarp();
      ProcessQueue(__shfl_sync(~0u, behind, 31));
      __syncwarp();
    }
  }

  // Processes the first `count` keys of the queue.
  __device__ __forceinline__ void ProcessQueue(int count) {
    for (int step = 0; step < count; step += S::kGroups * S::kUnroll) {
      uint4 keys[S::kUnroll][kChunks], values[S::kUnroll][kChunks];
      int at[S::kUnroll];
#pragma unroll
      for (int u = 0; u < S::kUnroll; ++u) {
        const int place = step + u * S::kGroups + group_;
        const int entry = place < count ? queue_[place] : 0;
        at[u] = __shfl_sync(~0u, tile_, entry / kRowwiseTile) * kRowwiseTile + entry % kRowwiseTile;
        if (place >= count) at[u] = -1;
        const auto key = static_cast<int64_t>(max(at[u], 0));
#pragma unroll
        for (int c = 0; c < kChunks; ++c) keys[u][c] = Load(key_ + key * p_.key_stride.s, c, p_.D, at[u] >= 0);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) values[u][c] = Load(value_ + key * p_.value_stride.s, c, p_.Dv, at[u] >= 0);
      }
      float score[S::kUnroll];
      float high = max_;
#pragma unroll
      for (int u = 0; u < S::kUnroll; ++u) {
        score[u] = 0.0f;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float own[S::kPerLoad];
          ToFloats(keys[u][c], own, key_);
#pragma unroll
          for (int e = 0; e < S::kPerLoad; ++e) score[u] = fmaf(query_[c * S::kPerLoad + e], own[e], score[u]);
        }
#pragma unroll
        for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) score[u] += __shfl_xor_sync(~0u, score[u], lanes);
        if constexpr (kScoreMod) score[u] = ApplyScoreMod(score[u], max(at[u], 0));
        if (mean_) score[u] = 0.0f;
        if (at[u] < 0) score[u] = -INFINITY;
        high = fmaxf(high, score[u]);
      }
      const float factor = max_ == -INFINITY ? 0.0f : Exp2(max_ - high);
      const float base = high == -INFINITY ? 0.0f : high;
      max_ = high;
      weights_ *= factor;
#pragma unroll
      for (int i = 0; i < S::kOwn; ++i) sum_[i] *= factor;
#pragma unroll
      for (int u = 0; u < S::kUnroll; ++u) {
        const float weight = Exp2(score[u] - base);
        weights_ += weight;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float own[S::kPerLoad];
          ToFloats(values[u][c], own, value_);
#pragma unroll
          for (int e = 0; e < S::kPerLoad; ++e)
            sum_[c * S::kPerLoad + e] = fmaf(weight, own[e], sum_[c * S::kPerLoad + e]);
        }
      }
    }
  }

  // Applies softcap and biases; gives units of log2.
  __device__ __forceinline__ float ApplyScoreMod(float x, int key) const {
    if (p_.softcap > 0.0f) x = p_.softcap * tanhf(x / p_.softcap);
    float bias = 0.0f;
    if (p_.bias != nullptr) {
      const int64_t at =
          b_ * p_.bias_stride_b + h_ * p_.bias_stride_h + row_ * p_.bias_stride_q + key * p_.bias_stride_k;
      bias =
          p_.bias_is_float != 0 ? static_cast<const float*>(p_.bias)[at] : ToFloat(static_cast<const T*>(p_.bias)[at]);
    }
    if (p_.relative_bias != nullptr) {
      const int radius = static_cast<int>(p_.relative_bias_size / 2);
      const int distance = max(-radius, min(radius, key - (p_.query_position + row_)));
      bias += p_.relative_bias[h_ * p_.relative_bias_stride_h + radius + distance];
    }
    // The lowest finite bias is no mask: it must not become -inf in units of log2. NaN stays NaN.
    const float natural = x + bias;
    float sum = natural * kLog2E;
    if (sum == -INFINITY && natural != -INFINITY) sum = kLowest;
    return bias == -INFINITY ? -INFINITY : sum;
  }

  // Combines the groups, in all lanes. Gives the row sum relative to 2^*top, the row max.
  __device__ __forceinline__ float CombineGroups(float* top) {
    float high = max_;
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, lanes));
    const float factor = max_ == -INFINITY ? 0.0f : Exp2(max_ - high);
    float total = weights_ * factor;
#pragma unroll
    for (int i = 0; i < S::kOwn; ++i) sum_[i] *= factor;
#pragma unroll
    for (int lanes = kLanes; lanes < 32; lanes *= 2) {
      total += __shfl_xor_sync(~0u, total, lanes);
#pragma unroll
      for (int i = 0; i < S::kOwn; ++i) sum_[i] += __shfl_xor_sync(~0u, sum_[i], lanes);
    }
    *top = high;
    return total;
  }

  const AttentionParams& p_;
  const int b_, h_, row_;
  uint16_t* const queue_;  // keys of 32 tiles: the lane that has the tile, and the key in it
  int lane_, group_;
  int tile_ = 0;  // the tile of this lane
  const T *key_, *value_;
  bool mean_ = false;
  float query_[S::kOwn], sum_[S::kOwn];
  float max_, weights_;
};

template <typename T, int kLanes, int kChunks, bool kScoreMod>
__global__ void __launch_bounds__(256, kScoreMod || kChunks > 1 ? 2 : 3)
    RowwiseKernel(const __grid_constant__ AttentionParams p) {
  using S = RowwiseShape<T, kLanes, kChunks>;
  __shared__ uint16_t queues[S::kWarps][S::kQueue];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int blocks = (p.S + S::kWarps - 1) / S::kWarps;
  const int bh = static_cast<int>(blockIdx.x) / blocks;
  const int row = static_cast<int>(blockIdx.x) % blocks * S::kWarps + warp;
  if (row >= p.S) return;
  RowwiseAttention<T, kLanes, kChunks, kScoreMod>(p, bh / p.H, bh % p.H, row, queues[warp]).Run();
}

template <typename T, int kLanes, int kChunks, bool kScoreMod>
int LaunchRowwise(const AttentionParams& params, void* stream) {
  using S = RowwiseShape<T, kLanes, kChunks>;
  const int64_t ctas = int64_t{params.B} * params.H * ((params.S + S::kWarps - 1) / S::kWarps);
  AttentionParams copy = params;
  void* arguments[] = {&copy};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(RowwiseKernel<T, kLanes, kChunks, kScoreMod>),
                                           dim3(static_cast<unsigned>(ctas)), dim3(S::kThreads), arguments, 0,
                                           static_cast<cudaStream_t>(stream)));
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_ROWWISE_KERNEL_CUH_
