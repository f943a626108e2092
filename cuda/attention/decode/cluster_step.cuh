// SPDX-License-Identifier: Apache-2.0
// One step of 16 keys of the cluster kernel: scores, biases and mask, online softmax, P V. Member functions of
// ClusterDecode, whose registers they use; cluster.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_DECODE_CLUSTER_STEP_CUH_
#define STOF_CUDA_ATTENTION_DECODE_CLUSTER_STEP_CUH_

#include "cuda/attention/decode/cluster.cuh"

namespace stof {
namespace cuda {

// ---- matmuls ----
template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ __forceinline__ void ClusterDecode<kHead, T, kBlocks, kColumns>::Scores(float (&s)[kBlocks][4]) {
  const uint32_t stage = OldestStage();
  float sums[2][kBlocks][4];  // two chains of matmuls
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[0][n][e] = sums[1][n][e] = 0.0f;
  }
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
    const uint32_t own = stage + 16 * static_cast<uint32_t>(lane_ ^ c % 2 * 4);
    const uint4 low = ReadChunk(own + 512 * c), high = ReadChunk(own + 512 * (S::kChunks + c));
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    uint4 q[kBlocks];
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      q[n] = ReadChunk(queries_ + static_cast<uint32_t>(16 * (32 * (n * S::kChunks + c) + lane_)));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t big[4], small[4];
      if constexpr (kFloat) {
#pragma unroll
        for (int e = 0; e < 4; ++e) SplitTf32(a[half][e], &big[e], &small[e]);
      }
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        float (&sum)[4] = sums[half][n];
        const uint32_t q0 = half == 0 ? q[n].x : q[n].z, q1 = half == 0 ? q[n].y : q[n].w;
        if constexpr (kFloat) {
          uint32_t query_big[2], query_small[2];
          SplitTf32(q0, &query_big[0], &query_small[0]);
          SplitTf32(q1, &query_big[1], &query_small[1]);
          MmaTf32(sum, small, query_big);
          MmaTf32(sum, big, query_small);
          MmaTf32(sum, big, query_big);
        } else {
          Mma<T>(sum, a[half], q0, q1);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = sums[0][n][e] + sums[1][n][e];
  }
}

template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ __forceinline__ void ClusterDecode<kHead, T, kBlocks, kColumns>::AddValues(const float (&s)[kBlocks][4]) {
  constexpr int kWide = S::kChunks / 2;
  const uint32_t stage =
      OldestStage() + 16 * ValueOrder(static_cast<uint32_t>(lane_) / 4, static_cast<uint32_t>(lane_) % 4);
  // Weights as operands: b in fp16 or bf16, big and small in TF32.
  uint32_t b[kBlocks][2], big[kBlocks][2][2], small[kBlocks][2][2];
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if constexpr (kFloat) {
      // Lane 4 (k % 8) + r / 2 has the weights of key k and row r; lane l needs keys l % 4 + 4 i and row l / 4.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int from = (i % 2 * 4 + lane_ % 4) * 4 + lane_ / 8;
        const float even = __shfl_sync(~0u, s[n][i / 2 * 2], from), odd = __shfl_sync(~0u, s[n][i / 2 * 2 + 1], from);
        SplitTf32(__float_as_uint(lane_ / 4 % 2 == 0 ? even : odd), &big[n][i / 2][i % 2], &small[n][i / 2][i % 2]);
      }
    } else {
      b[n][0] = Transpose(Pack<T>(s[n][0], s[n][1]));
      b[n][1] = Transpose(Pack<T>(s[n][2], s[n][3]));
    }
  }
#pragma unroll
  for (int c = 0; c < kWide; ++c) {
    uint32_t x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 read = ReadChunk(stage + 512 * (i * kWide + c));
      x[i][0] = read.x, x[i][1] = read.y, x[i][2] = read.z, x[i][3] = read.w;
    }
    if constexpr (kFloat) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t value_big[2][4], value_small[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            SplitTf32(x[2 * i + e / 2][2 * j + e % 2], &value_big[i][e], &value_small[i][e]);
          }
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) {
          // Tensor cores round sums towards zero: short sums, added in fp32 arithmetic.
          float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            MmaTf32(sum, value_small[i], big[n][i]);
            MmaTf32(sum, value_big[i], small[n][i]);
            MmaTf32(sum, value_big[i], big[n][i]);
          }
#pragma unroll
          for (int e = 0; e < 4; ++e) o_[n][2 * c + j][e] += sum[e];
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t a[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[2 * i] = __byte_perm(x[2 * i][j], x[2 * i + 1][j], 0x5410);
          a[2 * i + 1] = __byte_perm(x[2 * i][j], x[2 * i + 1][j], 0x7632);
        }
#pragma unroll
        for (int n = 0; n < kBlocks; ++n) Mma<T>(o_[n][4 * c + j], a, b[n][0], b[n][1]);
      }
    }
  }
}

// ---- scores to weights; element e: key lane / 4 + 8 (e / 2), row 2 (lane % 4) + e % 2 ----
template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ __forceinline__ void ClusterDecode<kHead, T, kBlocks, kColumns>::ApplyMaskAndBias(int step,
                                                                                             float (&s)[kBlocks][4]) {
  const bool mean = params_.second_pass != 0 && static_cast<EmptyRows>(p_.empty_rows) == EmptyRows::kMean;
  const bool score_mod = HasScoreMod(p_);
  const uint32_t from = steps_ + static_cast<uint32_t>(4 * (step % S::kStepSlots) * S::kStepWords);
  const uint4 found = ReadChunk(from);
  const int key0 = static_cast<int>(found.x) * kTileKeys + first_ + lane_ / 4;
  const bool bits = static_cast<int>(found.y) >= 0;
  if (score_mod) {
    // One copy of the code, not one an element: elements rotate through the first register.
#pragma unroll 1
    for (int at = 0; at < 4 * kBlocks; ++at) {
      int head = 0, query = 0;
      HeadAndQuery(at / 4 * 8 + lane_ % 4 * 2 + at % 2, &head, &query);
      const float x = ApplyScoreMod<T>(p_, s[0][0] * scale_, b_, head, query, key0 + at % 4 / 2 * 8);
#pragma unroll
      for (int e = 1; e < 4 * kBlocks; ++e) s[(e - 1) / 4][(e - 1) % 4] = s[e / 4][e % 4];
      s[kBlocks - 1][3] = x;
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * n + lane_ % 4 * 2 + r;
      uint32_t word = found.z;
      if (bits) {
        uint32_t own;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(own) : "r"(from + static_cast<uint32_t>(16 + 4 * row)));
        word &= own >> first_ % 32;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s[n][2 * i + r];
        if (!score_mod) x = __fmul_rn(x, scale_);
        if (mean) x = 0.0f;
        if ((word >> (lane_ / 4 + 8 * i) & 1u) == 0) x = -INFINITY;
      }
    }
  }
}

template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ __forceinline__ void ClusterDecode<kHead, T, kBlocks, kColumns>::Softmax(float (&s)[kBlocks][4]) {
  float high[kBlocks][2];
  bool raised = false;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) high[n][r] = fmaxf(max_[n][r], fmaxf(s[n][r], s[n][2 + r]));
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) high[n][r] = fmaxf(high[n][r], __shfl_xor_sync(~0u, high[n][r], step));
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) raised = raised || high[n][0] > max_[n][0] || high[n][1] > max_[n][1];
  if (raised) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float factor = WeightOf(max_[n][r], high[n][r]);
        max_[n][r] = high[n][r];
        sum_[n][r] *= factor;
#pragma unroll
        for (int j = 0; j < S::kOutputs; ++j) o_[n][j][r] *= factor, o_[n][j][2 + r] *= factor;
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = max_[n][r] == -INFINITY ? 0.0f : max_[n][r];
#pragma unroll
      for (int e = r; e < 4; e += 2) {
        s[n][e] = Exp2(s[n][e] - base);
        sum_[n][r] += s[n][e];
      }
    }
  }
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_CLUSTER_STEP_CUH_
