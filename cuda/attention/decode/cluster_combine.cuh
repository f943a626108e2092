// SPDX-License-Identifier: Apache-2.0
// The epilogue of the cluster kernel: combines warps, then CTAs through distributed shared memory, and stores the
// output. Member functions of ClusterDecode, whose registers they use; cluster.cuh includes this file behind the class.
#ifndef STOF_CUDA_ATTENTION_DECODE_CLUSTER_COMBINE_CUH_
#define STOF_CUDA_ATTENTION_DECODE_CLUSTER_COMBINE_CUH_

#include "cuda/attention/decode/cluster.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ void ClusterDecode<kHead, T, kBlocks, kColumns>::CombineWarps() {
  invalid_ = ReadInvalid(params_, b_);
  __syncwarp();  // all lanes have read the ring
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = sum_[n][r];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
      const int row = 8 * n + lane_ % 4 * 2 + r;
      if (row >= rows_) continue;
      if (lane_ < 4) WarpStats(warp_)[row] = make_float2(max_[n][r], sum);
#pragma unroll
      for (int j = 0; j < S::kOutputs; ++j) {
        constexpr int kBlocksOfChunk = S::kPerLoad / 2;
        const int d = 8 * S::kPerLoad * (j / kBlocksOfChunk) + S::kPerLoad * (lane_ / 4) + j % kBlocksOfChunk * 2;
        *reinterpret_cast<float2*>(&WarpOutputs(warp_)[row * kHead + d]) = make_float2(o_[n][j][r], o_[n][j][2 + r]);
      }
    }
  }
  __syncthreads();
  // Each CTA of the cluster combines a share of the output, four elements at a time.
  const int width = p_.Dv / 4, ctas = params_.splits, share = (rows_ * width + ctas - 1) / ctas;
  if (ctas > 1) AwaitCluster();  // all CTAs of the cluster run
  for (int at = threadIdx.x; at < rows_ * width; at += S::kThreads) {
    const int row = at / width, d = at % width * 4;
    float2 all = {-INFINITY, 0.0f};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) all.x = fmaxf(all.x, WarpStats(w)[row].x);
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) {
      const float2 own = WarpStats(w)[row];
      Add(*reinterpret_cast<const float4*>(&WarpOutputs(w)[row * kHead + d]), own.y, WeightOf(own.x, all.x), &x,
          &all.y);
    }
    if (ctas == 1) {
      StoreOutput(row, d, x, all);
      continue;
    }
    const int to = at / share, place = at - to * share;
    Send4(ReceivedOutputs(split_, share) + place, to, x);
    if (place == 0 || d == 0) Send2(ReceivedStats(split_) + row, to, all);  // once a row
  }
  if (ctas == 1) return;
  ArriveAtCluster();
  AwaitCluster();
  for (int place = threadIdx.x; place < min(share, rows_ * width - split_ * share); place += S::kThreads) {
    const int at = split_ * share + place, row = at / width, d = at % width * 4;
    float2 all = {-INFINITY, 0.0f};
    for (int from = 0; from < ctas; ++from) all.x = fmaxf(all.x, ReceivedStats(from)[row].x);
    float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int from = 0; from < ctas; ++from) {
      const float2 state = ReceivedStats(from)[row];
      Add(ReceivedOutputs(from, share)[place], state.y, WeightOf(state.x, all.x), &x, &all.y);
    }
    StoreOutput(row, d, x, all);
  }
}

// Normalizes and stores four elements of the output.
template <int kHead, typename T, int kBlocks, bool kColumns>
__device__ void ClusterDecode<kHead, T, kBlocks, kColumns>::StoreOutput(int row, int d, const float4& x,
                                                                        const float2& all) {
  const int whole = block_ * S::kRows + row;
  const int64_t index = RowOf(whole);
  const bool empty = all.y == 0.0f && invalid_ == 0;
  if (params_.empty_rows != nullptr) {
    if (params_.second_pass != 0 && params_.empty_rows[index] == 0) return;
    if (params_.second_pass == 0 && d == 0) params_.empty_rows[index] = empty ? 1 : 0;
  }
  const int h = head0_ + whole / p_.S;
  T* to = static_cast<T*>(p_.output) + b_ * p_.output_stride.b + h * p_.output_stride.h +
          whole % p_.S * p_.output_stride.s + d;
  const float values[4] = {x.x, x.y, x.z, x.w};
  const float row_sum = invalid_ != 0 ? NAN : empty ? 0.0f : all.y + SinkWeight<T>(p_, h, all.x);
  if (d == 0) StoreLse<T>(p_, b_, h, whole % p_.S, all.x, row_sum);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = FromFloat<T>(empty ? EmptyValue(p_) : values[i] / row_sum);
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_CLUSTER_COMBINE_CUH_
