// SPDX-License-Identifier: Apache-2.0
// Block-wise attention of fp32 tensors on tensor cores, compute capability 8.0 and later. A number is held as two
// halves, high + low, which together have 22 bits of mantissa, and a product takes three: high * high, high * low, low
// * high (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores"). fp16 has twice the rate of
// TF32 and its small range is no harm: queries and keys are scaled by a power of two each row, values each tile, and
// weights lie in 0 ... 2^8.
//
// Keys and values are split once, by a kernel before, since every row of tiles reads them again. Tensor cores round
// sums towards zero, which a long row of additions would show: the product of a tile's weights and values starts from
// zero and is added to the output by ordinary arithmetic.
//
// Where the model allows it (allow_tf32), one product of the high halves takes their place: 11 bits of mantissa, as
// TF32 has, at twice its rate.
#ifndef STOF_CUDA_ATTENTION_FP32_CUH_
#define STOF_CUDA_ATTENTION_FP32_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/attention_fp32.h"
#include "cuda/attention_sm80.cuh"

namespace stof {
namespace cuda {

// Scaled numbers lie below 2^15; low halves of values and weights are kept 2^11 times larger, so that they are no
// subnormals either.
constexpr int kTopExponent = 14;
constexpr float kLowScale = 2048.0f, kLowInverse = 1.0f / 2048.0f;

// kPlanes: 2, high and low halves, or 1, high ones alone. kRows: query rows of a CTA.
template <int kHead, int kPlanes, int kRows = kHead <= 64 ? 128 : 64>
struct Fp32Shape {
  static constexpr int kM = kRows, kN = kTileKeys;
  static constexpr int kBlocks = kHead <= 64 ? 2 : 1;  // of 16 rows, a warp
  static constexpr int kWarps = kM / 16 / kBlocks;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPieces = kTileRows / kM;  // CTAs for a tile of the mask
  static constexpr int kPlane = kN * kHead;       // elements
  static constexpr int kValueBytes = 2 * kPlanes * kPlane;
  static constexpr int kKeyBytes = kValueBytes + 4 * kN;  // the planes and the factors
  static constexpr int kQueryHalves = kPlanes * kM * kHead;
  static constexpr int kQueryBytes = 2 * kQueryHalves + 4 * kM;
  // How many lanes share a row when it is read, 4 elements at a time, and how often they do.
  static constexpr int kLanes = kHead > 64 ? 32 : kHead / 4;
  static constexpr int kQuads = (kHead + 4 * kLanes - 1) / (4 * kLanes);
  // stages 2 and 1: of keys and of values; 0: both take turns in one buffer.
  static constexpr int SharedBytes(int stages) {
    return kQueryBytes + (stages == 0 ? kKeyBytes : stages * (kKeyBytes + kValueBytes));
  }
};

// 2^exponent, which lies in -126 ... 127.
__device__ __forceinline__ float PowerOfTwo(int exponent) { return __int_as_float((127 + exponent) << 23); }

// The exponent of the largest finite magnitude, given by its bits; `least` where that is smaller.
__device__ __forceinline__ int ExponentOf(uint32_t bits, int least) {
  return max(least, static_cast<int>(bits >> 23) - 127);
}

__device__ __forceinline__ uint32_t FiniteBits(float x) {
  const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < 0x7f800000u ? bits : 0u;
}

// Elements [4 quad, 4 quad + 4) of a row of `size` elements; zeros beyond.
__device__ __forceinline__ float4 LoadQuad(const float* row, int quad, int size, bool valid, bool aligned) {
  float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int first = 4 * quad;
  if (!valid || first >= size) return x;
  if (aligned) return *reinterpret_cast<const float4*>(row + first);
  x.x = row[first];
  if (first + 1 < size) x.y = row[first + 1];
  if (first + 2 < size) x.z = row[first + 2];
  if (first + 3 < size) x.w = row[first + 3];
  return x;
}

__device__ __forceinline__ uint32_t LargestOf(const float4& x) {
  return max(max(FiniteBits(x.x), FiniteBits(x.y)), max(FiniteBits(x.z), FiniteBits(x.w)));
}

// high and low of two numbers, each pair in a word; low is multiplied by `scale`.
__device__ __forceinline__ void Split(float x, float y, float scale, uint32_t* high, uint32_t* low) {
  const __half2 top = __floats2half2_rn(x, y);
  const float2 kept = __half22float2(top);
  const __half2 rest = __floats2half2_rn((x - kept.x) * scale, (y - kept.y) * scale);
  *high = *reinterpret_cast<const uint32_t*>(&top);
  *low = *reinterpret_cast<const uint32_t*>(&rest);
}

// The low halves lie `plane` elements behind the high ones.
template <int kHead, int kPlanes>
__device__ __forceinline__ void StoreQuad(const float4& x, float factor, float scale, int row, int quad, __half* high,
                                          int plane) {
  uint2 top, rest;
  Split(x.x * factor, x.y * factor, scale, &top.x, &rest.x);
  Split(x.z * factor, x.w * factor, scale, &top.y, &rest.y);
  const int at = Place<kHead>(row, quad / 2) + quad % 2 * 4;
  *reinterpret_cast<uint2*>(high + at) = top;
  if constexpr (kPlanes == 2) *reinterpret_cast<uint2*>(high + plane + at) = rest;
}

__device__ __forceinline__ bool Aligned(const void* base, const Strides& stride, int size) {
  return (reinterpret_cast<uintptr_t>(base) % 16 | ((stride.b | stride.h | stride.s | size) & 3)) == 0;
}

// c = a · b where it is the first product of a sum, else c += a · b; known when compiled.
__device__ __forceinline__ void Product(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool first) {
  if (!first) return Mma<__half>(c, a, b0, b1);
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, "
      "%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// ---- the kernel that splits keys and values: a CTA takes one tile of one of them ----
template <int kHead, int kPlanes>
class Splitter {
  using S = Fp32Shape<kHead, kPlanes>;
  static constexpr int kThreads = 256;
  static constexpr int kRows = kThreads / S::kLanes;  // at a time
  static constexpr int kSteps = kTileKeys / kRows;

 public:
  static __device__ void Run(const Fp32Params& params) {
    const AttentionParams& p = params.attention;
    const int tiles = (p.T + kTileKeys - 1) / kTileKeys;
    const int64_t item = blockIdx.x / 2;
    const bool values = blockIdx.x % 2 != 0;
    const int tile = static_cast<int>(item % tiles);
    const int64_t bg = item / tiles;
    const int b = static_cast<int>(bg / p.G), g = static_cast<int>(bg % p.G);
    const Strides& stride = values ? p.value_stride : p.key_stride;
    const void* base = values ? p.value : p.key;
    const int size = values ? p.Dv : p.D;
    const bool aligned = Aligned(base, stride, size);
    const float* from = static_cast<const float*>(base) + b * stride.b + g * stride.h;
    __half* high = static_cast<__half*>(const_cast<void*>(values ? params.value_tiles : params.key_tiles)) +
                   item * kPlanes * S::kPlane;
    const int first = threadIdx.x / S::kLanes, lane = threadIdx.x % S::kLanes;
    // Values of padded keys are multiplied by zero: they may be anything that is finite, and have no say in the scale.
    const auto policy = static_cast<EmptyRows>(p.empty_rows);
    const bool drop = values && p.pad_bits != nullptr && policy != EmptyRows::kMean && policy != EmptyRows::kAll;
    float4 x[kSteps][S::kQuads];
    uint32_t largest[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int row = first + i * kRows;
      const int64_t key = int64_t{tile} * kTileKeys + row;
      bool valid = key < p.T;
      if (drop) {
        const uint32_t word = p.pad_bits[(int64_t{b} * tiles + tile) * 2 + row / 32];
        valid = valid && (word >> (row % 32) & 1u) != 0;
      }
      largest[i] = 0;
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        x[i][j] = LoadQuad(from + key * stride.s, lane + j * S::kLanes, size, valid, aligned);
        largest[i] = max(largest[i], LargestOf(x[i][j]));
      }
    }
    if (values) {
      __shared__ uint32_t found;
      if (threadIdx.x == 0) found = 0;
      __syncthreads();
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) most = max(most, largest[i]);
      most = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0) atomicMax(&found, most);
      __syncthreads();
      const int exponent = ExponentOf(found, -100) - kTopExponent;
      if (threadIdx.x == 0) const_cast<float*>(params.value_factors)[item] = PowerOfTwo(exponent);
      Store(x, high, first, lane, [exponent](int) { return PowerOfTwo(-exponent); }, kLowScale);
      return;
    }
    int exponents[kSteps];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int step = S::kLanes / 2; step > 0; step /= 2) {
        largest[i] = max(largest[i], __shfl_xor_sync(~0u, largest[i], step));
      }
      exponents[i] = ExponentOf(largest[i], -100) - kTopExponent;
      if (lane == 0) {
        const_cast<float*>(params.key_factors)[item * kTileKeys + first + i * kRows] = PowerOfTwo(exponents[i]);
      }
    }
    Store(x, high, first, lane, [&exponents](int i) { return PowerOfTwo(-exponents[i]); }, 1.0f);
  }

 private:
  template <typename Factor>
  static __device__ __forceinline__ void Store(const float4 (&x)[kSteps][S::kQuads], __half* high, int first, int lane,
                                               Factor factor, float scale) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        const int quad = lane + j * S::kLanes;
        if (4 * quad < kHead) {
          StoreQuad<kHead, kPlanes>(x[i][j], factor(i), scale, first + i * kRows, quad, high, S::kPlane);
        }
      }
    }
  }
};

// ---- attention: one CTA's work ----
template <int kHead, int kPlanes, int kTile, bool kExtras>
class Fp32Attention {
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  static constexpr int kColumns = S::kN / 8;              // blocks of 8 keys
  static constexpr int kOutputs = kHead / 8;              // blocks of 8 output elements
  static constexpr int kSteps = kHead / 16;               // of the inner product
  static constexpr int kGroup = S::kBlocks == 1 ? 4 : 2;  // blocks of columns that are computed at once

 public:
  __device__ Fp32Attention(const Fp32Params& params, int stages, int section, char* shared)
      : params_(params), p_(params.attention), stages_(stages), shared_(shared) {
    // A section of heads after the other, in it the long rows of all heads first.
    const int tile_rows = (p_.S + kTileRows - 1) / kTileRows;
    const int piece = blockIdx.x % S::kPieces, item = blockIdx.x / S::kPieces;
    const int first = item / (tile_rows * section) * section;
    const int heads = min(section, p_.B * p_.H - first);
    const int rest = item - first * tile_rows;
    const int bh = first + rest % heads;
    int row = rest / heads;
    b_ = bh / p_.H;
    h_ = bh % p_.H;
    tiles_ = (p_.T + S::kN - 1) / S::kN;
    if (p_.has_mask != 0) {
      const DeviceMask& mask = p_.mask;
      const int table = mask.layout[(mask.layout_b == 1 ? 0 : b_) * mask.layout_h + (mask.layout_h == 1 ? 0 : h_)];
      row = mask.order[table * mask.rows + row];
      const int at = table * mask.rows + row;
      begin_ = mask.row_ptr[at];
      full_ = mask.full_begin[at];
      end_ = mask.row_end[at];
    } else {
      end_ = tiles_;
    }
    piece0_ = piece * S::kM;
    row0_ = row * kTileRows + piece0_;
    group_ = static_cast<int64_t>(b_) * p_.G + h_ / (p_.H / p_.G);
    pad_ = p_.pad_bits == nullptr ? nullptr : p_.pad_bits + static_cast<int64_t>(b_) * tiles_ * 2;
    warp_ = threadIdx.x / 32;
    lane_ = threadIdx.x % 32;
  }

  __device__ void Run() {
    if (row0_ >= p_.S) return;
    LoadQueries();
    const auto policy = static_cast<EmptyRows>(p_.empty_rows);
    const bool twice = policy == EmptyRows::kMean || policy == EmptyRows::kAll;
    // A second time over all keys, for the rows without any. One loop for both: the code is large.
#pragma unroll 1
    for (bool unmasked = false;; unmasked = true) {
      Clear();
      Sweep(unmasked);
      const bool some_empty = Finish(unmasked);
      if (unmasked || !twice || __syncthreads_or(some_empty) == 0) return;
      if (p_.has_mask != 0) begin_ = full_ = 0, end_ = tiles_;
    }
  }

 private:
  // ---- which tiles ----
  struct Entry {
    int tile = -1;  // -1: none is left
    int bits = -1;  // index of its bits, -1: every key
    uint32_t pad[2] = {~0u, ~0u};
  };
  // The first entry from `i` on that padding leaves something of; i moves behind it.
  __device__ __forceinline__ Entry Next(int* i, bool unmasked) const {
    Entry entry;
    while (*i < end_) {
      const int at = (*i)++;
      if (p_.has_mask != 0 && !unmasked) {
        entry.tile = p_.mask.key_tile[at];
        entry.bits = at < full_ ? p_.mask.bits_id[at] : -1;
      } else {
        entry.tile = at;
      }
      if (pad_ != nullptr && !unmasked) {
        entry.pad[0] = pad_[2 * entry.tile];
        entry.pad[1] = pad_[2 * entry.tile + 1];
        if ((entry.pad[0] | entry.pad[1]) == 0) continue;
      } else if ((entry.tile + 1) * S::kN > p_.T) {
        const int keys = p_.T - entry.tile * S::kN;
        entry.pad[0] = keys >= 32 ? ~0u : (1u << keys) - 1u;
        entry.pad[1] = keys <= 32 ? 0u : (1u << (keys - 32)) - 1u;
      }
      return entry;
    }
    entry.tile = -1;
    return entry;
  }

  // ---- memory ----
  __device__ const __half* Queries() const { return reinterpret_cast<const __half*>(shared_); }
  __device__ float* QueryFactors() const { return reinterpret_cast<float*>(shared_ + 2 * S::kQueryHalves); }
  __device__ char* Keys(int stage) const { return shared_ + S::kQueryBytes + stage * S::kKeyBytes; }
  __device__ char* Values(int stage) const {
    return stages_ == 0 ? shared_ + S::kQueryBytes
                        : shared_ + S::kQueryBytes + stages_ * S::kKeyBytes + stage * S::kValueBytes;
  }
  static __device__ __forceinline__ void Copy(char* to, const char* from) {
    constexpr int kTimes = S::kValueBytes / 16 / S::kThreads;
    static_assert(kTimes * 16 * S::kThreads == S::kValueBytes, "every thread copies as much");
    const uint32_t target = SharedAddress(to) + 16 * threadIdx.x;
    from += 16 * threadIdx.x;
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      CopyAsync16(target + 16 * S::kThreads * i, from + 16 * S::kThreads * i, true);
    }
  }
  __device__ __forceinline__ void FetchKeys(int tile, int stage) {
    if (tile >= 0) {
      const int64_t at = group_ * tiles_ + tile;
      Copy(Keys(stage), static_cast<const char*>(params_.key_tiles) + at * S::kValueBytes);
      if (threadIdx.x < S::kN / 4) {
        CopyAsync16(SharedAddress(Keys(stage) + S::kValueBytes + 16 * threadIdx.x),
                    params_.key_factors + at * S::kN + 4 * threadIdx.x, true);
      }
    }
    CommitCopies();
  }
  __device__ __forceinline__ void FetchValues(int tile, int stage) {
    if (tile >= 0) {
      Copy(Values(stage), static_cast<const char*>(params_.value_tiles) + (group_ * tiles_ + tile) * S::kValueBytes);
    }
    CommitCopies();
  }

  // Each warp its own rows.
  __device__ void LoadQueries() {
    const float* from = static_cast<const float*>(p_.query) + b_ * p_.query_stride.b + h_ * p_.query_stride.h;
    const bool aligned = Aligned(p_.query, p_.query_stride, p_.D);
    auto* high = reinterpret_cast<__half*>(shared_);
    constexpr int kRows = 16 * S::kBlocks, kAtOnce = 32 / S::kLanes;
    const int lane = lane_ % S::kLanes;
#pragma unroll 2
    for (int i = 0; i < kRows; i += kAtOnce) {
      const int row = warp_ * kRows + i + lane_ / S::kLanes;
      float4 x[S::kQuads];
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        x[j] =
            LoadQuad(from + (row0_ + row) * p_.query_stride.s, lane + j * S::kLanes, p_.D, row0_ + row < p_.S, aligned);
        largest = max(largest, LargestOf(x[j]));
      }
#pragma unroll
      for (int step = S::kLanes / 2; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, step));
      }
      const int exponent = ExponentOf(largest, -100) - kTopExponent;
      if (lane == 0) QueryFactors()[row] = PowerOfTwo(exponent);
#pragma unroll
      for (int j = 0; j < S::kQuads; ++j) {
        const int quad = lane + j * S::kLanes;
        if (4 * quad < kHead) {
          StoreQuad<kHead, kPlanes>(x[j], PowerOfTwo(-exponent), 1.0f, row, quad, high, S::kM * kHead);
        }
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Scores come in units of log2 where nothing has to be done to them before.
        scale_[i][r] = QueryFactors()[Row(i, r)] * (kExtras ? p_.scale : p_.scale * kLog2E);
      }
    }
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) max_[i][r] = -INFINITY, sum_[i][r] = 0.0f;
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o_[i][j][e] = 0.0f;
      }
    }
  }

  // ---- the loop ----
  // With one stage the next tile is asked for when everybody has done with this one, and comes under the other product.
  __device__ void Sweep(bool unmasked) {
    int i = begin_;
    Entry entry = Next(&i, unmasked);
    FetchKeys(entry.tile, 0);
    if (stages_ > 0) FetchValues(entry.tile, 0);
    int stage = 0;
    while (entry.tile >= 0) {
      const Entry next = Next(&i, unmasked);
      const float value_factor = params_.value_factors[group_ * tiles_ + entry.tile];
      if (stages_ > 0) {
        WaitCopies<1>();  // the keys; the values may still come
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      const int other = stages_ == 2 ? stage ^ 1 : 0;
      if (stages_ == 2) FetchKeys(next.tile, other);
      float s[S::kBlocks][kColumns][4];
      Scores(Keys(stage), s);
      if (stages_ < 2) {
        __syncthreads();
        if (stages_ == 1) {
          FetchKeys(next.tile, 0);
        } else {
          FetchValues(entry.tile, 0);
        }
      }
      Adjust(entry, unmasked, s);
      Softmax(s);
      if (stages_ > 0) {
        WaitCopies<1>();
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      if (stages_ == 2) FetchValues(next.tile, other);
      AddValues(reinterpret_cast<const __half*>(Values(stage)), value_factor, s);
      if (stages_ < 2) {
        __syncthreads();
        if (stages_ == 1) {
          FetchValues(next.tile, 0);
        } else {
          FetchKeys(next.tile, 0);
        }
      }
      entry = next;
      stage = other;
    }
    WaitCopies<0>();
    __syncthreads();
  }

  __device__ __forceinline__ void Scores(const char* stage, float (&s)[S::kBlocks][kColumns][4]) {
    const auto* keys = reinterpret_cast<const __half*>(stage);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t high[S::kBlocks][4], low[S::kBlocks][4];
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        const __half* at = Queries() + Place<kHead>((warp_ * S::kBlocks + i) * 16 + lane_ % 16, 2 * k + lane_ / 16);
        LoadMatrix4(high[i], SharedAddress(at));
        if constexpr (kPlanes == 2) LoadMatrix4(low[i], SharedAddress(at + S::kM * kHead));
      }
#pragma unroll
      for (int j = 0; j < kColumns; j += kGroup) {
        uint32_t top[kGroup / 2][4], rest[kGroup / 2][4];
#pragma unroll
        for (int n = 0; n < kGroup / 2; ++n) {
          const int row = 8 * j + 16 * n + lane_ % 8 + lane_ / 16 * 8;
          const __half* at = keys + Place<kHead>(row, 2 * k + lane_ / 8 % 2);
          LoadMatrix4(top[n], SharedAddress(at));
          if constexpr (kPlanes == 2) LoadMatrix4(rest[n], SharedAddress(at + S::kPlane));
        }
        if constexpr (kPlanes == 2) {
          Products(s, j, low, top, k == 0);
          Products(s, j, high, rest, false);
        }
        Products(s, j, high, top, kPlanes == 1 && k == 0);
      }
    }
    const auto* factors = reinterpret_cast<const float*>(stage + S::kValueBytes);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float2 factor = *reinterpret_cast<const float2*>(factors + 8 * j + lane_ % 4 * 2);
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // One after the other: their product may be beyond fp32 where the score is not.
          s[i][j][2 * r] = s[i][j][2 * r] * factor.x * scale_[i][r];
          s[i][j][2 * r + 1] = s[i][j][2 * r + 1] * factor.y * scale_[i][r];
        }
      }
    }
  }

  static __device__ __forceinline__ void Products(float (&s)[S::kBlocks][kColumns][4], int j,
                                                  const uint32_t (&a)[S::kBlocks][4],
                                                  const uint32_t (&b)[kGroup / 2][4], bool first) {
#pragma unroll
    for (int n = 0; n < kGroup / 2; ++n) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
        Product(s[i][j + 2 * n], a[i], b[n][0], b[n][1], first);
        Product(s[i][j + 2 * n + 1], a[i], b[n][2], b[n][3], first);
      }
    }
  }

  __device__ __forceinline__ int Row(int i, int r) const { return (warp_ * S::kBlocks + i) * 16 + lane_ / 4 + 8 * r; }

  __device__ __forceinline__ void Adjust(const Entry& entry, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
    if constexpr (kExtras) AddBiases(entry.tile * S::kN, unmasked, s);
    if (unmasked && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kMean) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
        }
      }
    }
    if (entry.bits < 0 && (entry.pad[0] & entry.pad[1]) == ~0u) return;
    // Not a pointer that may be null: ptxas 13.0 compares it with zero sooner than the zero arrives
    // (docs/cuda-kernel.md).
    const uint32_t* bits = p_.mask.bits + (static_cast<int64_t>(max(entry.bits, 0)) * kTileRows + piece0_) * 2;
    const int shift = lane_ % 4 * 2;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t word[2] = {entry.pad[0], entry.pad[1]};
        if (entry.bits >= 0) {
          uint32_t own[2];
          LoadConstant(own, bits + 2 * Row(i, r));
          word[0] &= own[0];
          word[1] &= own[1];
        }
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const uint32_t here = word[j / 4] >> (j % 4 * 8 + shift);
          if ((here & 1u) == 0) s[i][j][2 * r] = -INFINITY;
          if ((here & 2u) == 0) s[i][j][2 * r + 1] = -INFINITY;
        }
      }
    }
  }

  // Softcap and biases; scores come out in units of log2. What lies beyond the tensors reads their last element and is
  // forbidden afterwards, as in the kernel for halves.
  __device__ __forceinline__ void AddBiases(int key0, bool unmasked, float (&s)[S::kBlocks][kColumns][4]) {
    const int radius = static_cast<int>(p_.relative_bias_size / 2);
    const float* relative =
        p_.relative_bias == nullptr ? nullptr : p_.relative_bias + h_ * p_.relative_bias_stride_h + radius;
    const int64_t head = b_ * p_.bias_stride_b + h_ * p_.bias_stride_h;
    const auto* dense = static_cast<const float*>(p_.bias);
    const float inverse = 1.0f / p_.softcap;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = min(row0_ + Row(i, e / 2), p_.S - 1);
          const int key = min(key0 + 8 * j + lane_ % 4 * 2 + e % 2, p_.T - 1);
          float x = s[i][j][e];
          if (p_.softcap > 0.0f) x = p_.softcap * tanhf(x * inverse);
          float bias = 0.0f;
          if (dense != nullptr) bias = dense[head + row * p_.bias_stride_q + key * p_.bias_stride_k];
          if (relative != nullptr) bias += relative[max(-radius, min(radius, key - (p_.query_position + row)))];
          float sum = (x + bias) * kLog2E;
          // The lowest finite value is a bias, not a mask: it must not become -inf in units of log2. NaN stays NaN.
          if (sum == -INFINITY) sum = kLowest;
          s[i][j][e] = bias == -INFINITY ? (unmasked ? x * kLog2E : -INFINITY) : sum;
        }
      }
    }
  }

  __device__ __forceinline__ void Softmax(float (&s)[S::kBlocks][kColumns][4]) {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float high = -INFINITY;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) high = fmaxf(high, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        const float old = max_[i][r];
        if (high > old + kSlack) {
          const float factor = old == -INFINITY ? 0.0f : Exp2(old - high);
          max_[i][r] = high;
          sum_[i][r] *= factor;
#pragma unroll
          for (int j = 0; j < kOutputs; ++j) o_[i][j][2 * r] *= factor, o_[i][j][2 * r + 1] *= factor;
        }
        const float base = max_[i][r] == -INFINITY ? 0.0f : max_[i][r];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            s[i][j][e] = Exp2(s[i][j][e] - base);
            sum_[i][r] += s[i][j][e];
          }
        }
      }
    }
  }

  __device__ __forceinline__ void AddValues(const __half* values, float factor,
                                            const float (&s)[S::kBlocks][kColumns][4]) {
    constexpr int kParts = S::kN / 16;
    uint32_t high[kParts][S::kBlocks][4], low[kParts][S::kBlocks][4];
#pragma unroll
    for (int k = 0; k < kParts; ++k) {
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 4; ++half) {
          const float* pair = &s[i][2 * k + half / 2][half % 2 * 2];
          Split(pair[0], pair[1], kLowScale, &high[k][i][half], &low[k][i][half]);
        }
      }
    }
    const float low_factor = factor * kLowInverse;
#pragma unroll
    for (int j = 0; j < kOutputs; j += 2) {
      float large[S::kBlocks][2][4], small[S::kBlocks][2][4];
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        uint32_t top[4];
        const __half* at = values + Place<kHead>(16 * k + lane_ % 16, j + lane_ / 16);
        LoadMatrix4Transposed(top, SharedAddress(at));
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i) {
          if constexpr (kPlanes == 2) {
            Product(small[i][0], low[k][i], top[0], top[1], k == 0);
            Product(small[i][1], low[k][i], top[2], top[3], k == 0);
          }
          Product(large[i][0], high[k][i], top[0], top[1], k == 0);
          Product(large[i][1], high[k][i], top[2], top[3], k == 0);
        }
        if constexpr (kPlanes == 2) {
          uint32_t rest[4];
          LoadMatrix4Transposed(rest, SharedAddress(at + S::kPlane));
#pragma unroll
          for (int i = 0; i < S::kBlocks; ++i) {
            Product(small[i][0], high[k][i], rest[0], rest[1], false);
            Product(small[i][1], high[k][i], rest[2], rest[3], false);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float& o = o_[i][j + e / 4][e % 4];
          o = fmaf(large[i][e / 4][e % 4], factor, o);
          if constexpr (kPlanes == 2) o = fmaf(small[i][e / 4][e % 4], low_factor, o);
        }
      }
    }
  }

  // ---- the end ----
  // Divides and writes; with `only_empty` the rows that had no key. Whether this thread saw one.
  __device__ bool Finish(bool only_empty) {
    bool some_empty = false;
    float* const output = static_cast<float*>(p_.output) + b_ * p_.output_stride.b + h_ * p_.output_stride.h;
    const bool pairs = (reinterpret_cast<uintptr_t>(p_.output) % 8 |
                        ((p_.output_stride.b | p_.output_stride.h | p_.output_stride.s | p_.Dv) & 1)) == 0;
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float sum = sum_[i][r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool empty = sum == 0.0f;
        if (!only_empty) empty_[i][r] = empty;
        const int row = row0_ + Row(i, r);
        some_empty |= empty && row < p_.S;
        if (p_.sink != nullptr && !empty) {
          const float logit = static_cast<const float*>(p_.sink)[h_];
          sum += Exp2(fminf(logit * kLog2E - max_[i][r], 127.0f));
        }
        if (!only_empty && lane_ % 4 == 0) StoreLogSum<float>(p_, b_, h_, row, max_[i][r], sum);
        const bool nothing = empty && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kNan;
        const float factor = empty ? 0.0f : 1.0f / sum;
        if (row >= p_.S || (only_empty && !empty_[i][r])) continue;
        float* const to = output + row * p_.output_stride.s;
#pragma unroll
        for (int j = 0; j < kOutputs; ++j) {
          const int d = 8 * j + lane_ % 4 * 2;
          const float2 x =
              make_float2(nothing ? NAN : o_[i][j][2 * r] * factor, nothing ? NAN : o_[i][j][2 * r + 1] * factor);
          if (pairs) {
            if (d < p_.Dv) *reinterpret_cast<float2*>(to + d) = x;
          } else {
            if (d < p_.Dv) to[d] = x.x;
            if (d + 1 < p_.Dv) to[d + 1] = x.y;
          }
        }
      }
    }
    return some_empty;
  }

  const Fp32Params& params_;
  const AttentionParams& p_;
  const int stages_;
  char* const shared_;
  int b_, h_, row0_, piece0_, warp_, lane_, tiles_;
  int64_t group_;
  int begin_ = 0, full_ = 0, end_ = 0;
  const uint32_t* pad_;
  float scale_[S::kBlocks][2];
  float o_[S::kBlocks][kOutputs][4];
  float max_[S::kBlocks][2], sum_[S::kBlocks][2];
  bool empty_[S::kBlocks][2];
};

template <int kHead, int kPlanes>
__global__ void __launch_bounds__(256) SplitKernel(const __grid_constant__ Fp32Params params) {
  Splitter<kHead, kPlanes>::Run(params);
}

template <int kHead, int kPlanes, int kTile, bool kExtras>
__global__ void __launch_bounds__(Fp32Shape<kHead, kPlanes, kTile>::kThreads, kHead <= 128 ? 2 : 1)
    Fp32AttentionKernel(const __grid_constant__ Fp32Params params, int stages, int section) {
  extern __shared__ __align__(128) char fp32_shared[];
  Fp32Attention<kHead, kPlanes, kTile, kExtras>(params, stages, section, fp32_shared).Run();
}

// What a kernel is launched with.
struct Fp32Arrangement {
  int stages = 0;
  int section = 1;  // heads whose keys and values fill half of the L2 cache
};

// Two stages where two CTAs fit a multiprocessor with them; else as many as let two CTAs fit, or one. False where a
// multiprocessor has too little shared memory.
template <int kHead, int kPlanes, int kTile>
cudaError_t Arrange(const AttentionParams& p, bool* fits, Fp32Arrangement* arrangement) {
  int device = 0, block = 0, whole = 0, cache = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&whole, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  constexpr int kReserved = 1024;                            // a CTA
  if (const int most = CappedShared(block); most < block) {  // a test's
    block = most;
    whole = std::min(whole, block + kReserved);
  }
  const int64_t heads = int64_t{p.B} * p.H, head_bytes = int64_t{4} * kPlanes * kHead * p.T / (p.H / p.G) + 1;
  const int64_t sections = 1 + (heads * head_bytes - 1) / std::max(cache / 2, 1);
  arrangement->section = static_cast<int>((heads + sections - 1) / sections);
  for (const int ctas : {2, 1}) {
    for (int stages = 2; stages >= (ctas == 1 ? 0 : 1); --stages) {
      const int bytes = Fp32Shape<kHead, kPlanes, kTile>::SharedBytes(stages);
      if (bytes > block || ctas * (bytes + kReserved) > whole) continue;
      arrangement->stages = stages;
      *fits = true;
      return cudaSuccess;
    }
  }
  *fits = false;
  return cudaSuccess;
}

template <int kHead, int kPlanes, int kTile, bool kExtras>
int LaunchFp32As(const Fp32Params& params, const Fp32Arrangement& arrangement, void* stream) {
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  auto* kernel = Fp32AttentionKernel<kHead, kPlanes, kTile, kExtras>;
  const int bytes = S::SharedBytes(arrangement.stages);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const AttentionParams& p = params.attention;
  const int64_t items = static_cast<int64_t>(p.B) * p.H * ((p.S + kTileRows - 1) / kTileRows) * S::kPieces;
  Fp32Params copy = params;
  int stages = arrangement.stages, section = arrangement.section;
  void* arguments[] = {&copy, &stages, &section};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(items)),
                                           dim3(S::kThreads), arguments, static_cast<size_t>(bytes),
                                           static_cast<cudaStream_t>(stream)));
}

template <int kHead, int kPlanes>
int LaunchFp32(const Fp32Params& params, bool extras, void* stream) {
  constexpr int kTile = Fp32Shape<kHead, kPlanes>::kM;
  Fp32Arrangement arrangement;
  bool fits = false;
  cudaError_t error = Arrange<kHead, kPlanes, kTile>(params.attention, &fits, &arrangement);
  if (error != cudaSuccess) return static_cast<int>(error);
  if (fits) {
    return extras ? LaunchFp32As<kHead, kPlanes, kTile, true>(params, arrangement, stream)
                  : LaunchFp32As<kHead, kPlanes, kTile, false>(params, arrangement, stream);
  }
  if constexpr (kHead > 192 && kPlanes == 2) {  // 99 KiB, as compute capability 8.6, 8.9 and 12.0 have
    constexpr int kSmall = 32;
    error = Arrange<kHead, kPlanes, kSmall>(params.attention, &fits, &arrangement);
    if (error != cudaSuccess) return static_cast<int>(error);
    if (fits) {
      return extras ? LaunchFp32As<kHead, kPlanes, kSmall, true>(params, arrangement, stream)
                    : LaunchFp32As<kHead, kPlanes, kSmall, false>(params, arrangement, stream);
    }
  }
  return static_cast<int>(cudaErrorInvalidConfiguration);
}

template <int kHead, int kPlanes>
int SplitFp32(const Fp32Params& params, void* stream) {
  const AttentionParams& p = params.attention;
  const int64_t items = int64_t{2} * p.B * p.G * ((p.T + kTileKeys - 1) / kTileKeys);
  if (items == 0) return 0;
  Fp32Params copy = params;
  void* arguments[] = {&copy};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(SplitKernel<kHead, kPlanes>),
                                           dim3(static_cast<unsigned>(items)), dim3(256), arguments, 0,
                                           static_cast<cudaStream_t>(stream)));
}

template <int kHead>
Fp32Kernel MakeFp32Kernel(bool exact) {
  if (exact) return {kHead, 2, SplitFp32<kHead, 2>, LaunchFp32<kHead, 2>};
  return {kHead, 1, SplitFp32<kHead, 1>, LaunchFp32<kHead, 1>};
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_CUH_
