// SPDX-License-Identifier: Apache-2.0
// Launches the split-KV kernel; its entry in the tables of the decode kernels.
#ifndef STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/decode/combine.cuh"
#include "cuda/attention/decode/splitkv.cuh"

namespace stof {
namespace cuda {

template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
__global__ void __launch_bounds__(DecodeShape<kHead, T, Stored, kBlocks>::kThreads,
                                  DecodeShape<kHead, T, Stored, kBlocks>::kCtas)
    DecodeAttention(const __grid_constant__ DecodeParams params) {
  using Kernel = Decode<kHead, T, Stored, kBlocks, kSource>;
  __shared__ typename Kernel::Shared shared;
  Kernel(params, shared).Run();
}

template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
int LaunchDecode(const DecodeParams& params, void* stream) {
  using S = DecodeShape<kHead, T, Stored, kBlocks>;
  const AttentionParams& p = params.attention;
  const int64_t blocks = (int64_t{params.heads} * p.S + S::kRows - 1) / S::kRows * (p.H / p.G / params.heads);
  constexpr auto kKernel = DecodeAttention<kHead, T, Stored, kBlocks, kSource>;
  return LaunchKernel<DecodeParams, kKernel>(params, static_cast<unsigned>(int64_t{p.B} * p.G * params.splits * blocks),
                                             S::kThreads, 0, stream, CanStartEarly<DecodeParams, kKernel>());
}

template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
constexpr DecodeCode MakeSplitKvCode() {
  DecodeCode code;
  code.launch = LaunchDecode<kHead, T, Stored, kBlocks, kSource>;
  if constexpr (kSource == KeySource::kCache) {
    code.launch_columns = LaunchDecode<kHead, T, Stored, kBlocks, KeySource::kColumns>;
  }
  code.combine = LaunchCombine<T>;
  return code;
}
template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
constexpr DecodeCode kSplitKvCode = MakeSplitKvCode<kHead, T, Stored, kBlocks, kSource>();

template <int kHead, typename T, typename Stored, int kBlocks, KeySource kSource>
constexpr KernelEntry MakeSplitKvKernel() {
  using S = DecodeShape<kHead, T, Stored, kBlocks>;
  KernelEntry kernel;
  kernel.name = "decode-splitkv";
  kernel.head_size = kHead;
  kernel.rows = S::kRows, kernel.keys = kTileKeys;
  kernel.ctas_per_sm = S::kCtas;
  kernel.code = &kSplitKvCode<kHead, T, Stored, kBlocks, kSource>;
  return kernel;
}

// The table of the kernel for quantized keys and values.
template <int kHead, typename T, typename Stored, int kBlocks>
constexpr KernelEntry kQuantizedDecodeKernels[] = {MakeSplitKvKernel<kHead, T, Stored, kBlocks, KeySource::kCache>()};

template <typename T, typename Stored>
KernelTable FindQuantizedDecode(const KernelProblem& problem) {
  const bool few = problem.packed_queries <= 8;
  if (problem.head_size <= 64) {
    return few ? kQuantizedDecodeKernels<64, T, Stored, 1> : kQuantizedDecodeKernels<64, T, Stored, 2>;
  }
  if (problem.head_size <= 128) {
    return few ? kQuantizedDecodeKernels<128, T, Stored, 1> : kQuantizedDecodeKernels<128, T, Stored, 2>;
  }
  return kQuantizedDecodeKernels<256, T, Stored, 1>;
}

// The table of the kernel for keys and values in pages.
template <int kHead, typename T, int kBlocks>
constexpr KernelEntry kPagedDecodeKernels[] = {MakeSplitKvKernel<kHead, T, T, kBlocks, KeySource::kPages>()};

template <typename T>
KernelTable FindPagedDecode(const KernelProblem& problem) {
  const bool few = problem.packed_queries <= 8;
  if (problem.head_size <= 64) return few ? kPagedDecodeKernels<64, T, 1> : kPagedDecodeKernels<64, T, 2>;
  if (problem.head_size <= 128) return few ? kPagedDecodeKernels<128, T, 1> : kPagedDecodeKernels<128, T, 2>;
  return kPagedDecodeKernels<256, T, 1>;
}

// The table of the kernel for the pages that KV heads have chosen.
template <int kHead, typename T, int kBlocks>
constexpr KernelEntry kChosenDecodeKernels[] = {MakeSplitKvKernel<kHead, T, T, kBlocks, KeySource::kChosenPages>()};

template <typename T>
KernelTable FindChosenDecode(const KernelProblem& problem) {
  const bool few = problem.packed_queries <= 8;
  if (problem.head_size == 64) return few ? kChosenDecodeKernels<64, T, 1> : kChosenDecodeKernels<64, T, 2>;
  if (problem.head_size == 128) return few ? kChosenDecodeKernels<128, T, 1> : kChosenDecodeKernels<128, T, 2>;
  return KernelTable();
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_DECODE_SPLITKV_LAUNCH_CUH_
