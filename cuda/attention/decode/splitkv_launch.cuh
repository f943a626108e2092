// SPDX-License-Identifier: Apache-2.0
// Launches the split-KV kernel; its entry in the tables of the decode kernels.
#ifndef STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/combine.cuh"
#include "cuda/attention/decode/splitkv.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, int kBlocks, bool kColumns>
__global__ void __launch_bounds__(DecodeShape<kHead, T, kBlocks>::kThreads, DecodeShape<kHead, T, kBlocks>::kCtas)
    DecodeAttention(const __grid_constant__ DecodeParams params) {
  using Kernel = Decode<kHead, T, kBlocks, kColumns>;
  __shared__ typename Kernel::Shared shared;
  Kernel(params, shared).Run();
}

template <int kHead, typename T, int kBlocks, bool kColumns>
int LaunchDecode(const DecodeParams& params, void* stream) {
  using S = DecodeShape<kHead, T, kBlocks>;
  const AttentionParams& p = params.attention;
  const int64_t blocks = (int64_t{params.heads} * p.S + S::kRows - 1) / S::kRows * (p.H / p.G / params.heads);
  DecodeParams copy = params;
  void* arguments[] = {&copy};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(DecodeAttention<kHead, T, kBlocks, kColumns>),
                                           dim3(static_cast<unsigned>(int64_t{p.B} * p.G * params.splits * blocks)),
                                           dim3(S::kThreads), arguments, 0, static_cast<cudaStream_t>(stream)));
}

template <int kHead, typename T, int kBlocks>
constexpr SplitKvCode MakeSplitKvCode() {
  SplitKvCode code;
  code.launch = LaunchDecode<kHead, T, kBlocks, false>;
  code.launch_columns = LaunchDecode<kHead, T, kBlocks, true>;
  code.combine = LaunchCombine<T>;
  return code;
}
template <int kHead, typename T, int kBlocks>
constexpr SplitKvCode kSplitKvCode = MakeSplitKvCode<kHead, T, kBlocks>();

template <int kHead, typename T, int kBlocks>
constexpr KernelEntry MakeSplitKvKernel() {
  using S = DecodeShape<kHead, T, kBlocks>;
  KernelEntry kernel;
  kernel.name = "decode-splitkv";
  kernel.head_size = kHead;
  kernel.rows = S::kRows, kernel.keys = kTileKeys;
  kernel.ctas_per_sm = S::kCtas;
  kernel.code = &kSplitKvCode<kHead, T, kBlocks>;
  return kernel;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_
