// SPDX-License-Identifier: Apache-2.0
// Launches of the fp32 kernel, and its tables.
#ifndef STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "cuda/attention/fp32/kernel.cuh"
#include "cuda/attention/fp32/split_operands.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {

template <int kHead, int kPlanes, int kRows, bool kScoreMod, bool kRelative>
int LaunchFp32Kernel(const Fp32ParamsOf<kRelative>& params, int stages, int l2_heads, void* stream) {
  using S = Fp32Shape<kHead, kPlanes, kRows>;
  auto* kernel = Fp32AttentionKernel<kHead, kPlanes, kRows, kScoreMod, kRelative>;
  const int bytes = S::SharedBytes(stages);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const AttentionParams& p = params.attention;
  const int64_t items = static_cast<int64_t>(p.B) * p.H * ((p.S + kTileRows - 1) / kTileRows) * S::kCtasPerTile;
  Fp32ParamsOf<kRelative> copy = params;
  void* arguments[] = {&copy, &stages, &l2_heads};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(items)),
                                           dim3(S::kThreads), arguments, static_cast<size_t>(bytes),
                                           static_cast<cudaStream_t>(stream)));
}

template <int kHead, int kPlanes, int kRows, bool kScoreMod>
int LaunchFp32(const Fp32Params& params, int stages, int l2_heads, void* stream) {
  return LaunchFp32Kernel<kHead, kPlanes, kRows, kScoreMod, false>(params, stages, l2_heads, stream);
}

template <int kHead, int kRows>
int LaunchFp32Relative(const Fp32Params& params, const RelativeParams& relative, int stages, int l2_heads,
                       void* stream) {
  Fp32RelativeParams both;
  static_cast<Fp32Params&>(both) = params;
  both.relative = relative;
  return LaunchFp32Kernel<kHead, 2, kRows, true, true>(both, stages, l2_heads, stream);
}

template <int kHead, int kPlanes, int kRows>
constexpr Fp32CtaSize MakeFp32CtaSize() {
  using S = Fp32Shape<kHead, kPlanes, kRows>;
  Fp32CtaSize size;
  size.rows = kRows;
  size.ctas_per_sm = S::kCtas;
  size.most_stages = CtaSize::kMostStages;
  for (int stages = 0; stages <= size.most_stages; ++stages) size.shared_bytes[stages] = S::SharedBytes(stages);
  size.launch = LaunchFp32<kHead, kPlanes, kRows, false>;
  if constexpr (kRows <= 64) size.launch_score_mod = LaunchFp32<kHead, kPlanes, kRows, true>;
  return size;
}

template <int kHead, int kPlanes>
constexpr Fp32Code MakeFp32Code() {
  Fp32Code code;
  code.planes = kPlanes;
  code.split = SplitFp32<kHead, kPlanes>;
  code.sizes[0] = MakeFp32CtaSize<kHead, kPlanes, 64>();
  if constexpr (kHead <= 64) code.sizes[1] = MakeFp32CtaSize<kHead, kPlanes, 128>();
  // For 99 KiB: compute capability 8.6, 8.9 and 12.0.
  if constexpr (kHead > 192 && kPlanes == 2) code.sizes[2] = MakeFp32CtaSize<kHead, kPlanes, 32>();
  return code;
}
template <int kHead, int kPlanes>
constexpr Fp32Code kFp32Code = MakeFp32Code<kHead, kPlanes>();

template <int kHead, int kPlanes>
constexpr KernelEntry MakeFp32Kernel() {
  KernelEntry kernel;
  kernel.name = "fp32";
  kernel.head_size = kHead;
  kernel.rows = kTileRows, kernel.keys = kTileKeys;
  kernel.code = &kFp32Code<kHead, kPlanes>;
  return kernel;
}
template <int kHead, int kPlanes>
constexpr KernelEntry kFp32Kernels[] = {MakeFp32Kernel<kHead, kPlanes>()};

// Kernels with relative terms have the error of fp32 alone, and softcap and biases.
template <int kHead, int kRows>
constexpr Fp32CtaSize MakeFp32RelativeCtaSize() {
  using S = Fp32Shape<kHead, 2, kRows>;
  Fp32CtaSize size;
  size.rows = kRows;
  size.ctas_per_sm = Fp32Ctas<kHead, 2, kRows, true>;
  size.most_stages = CtaSize::kMostStages;
  for (int stages = 0; stages <= size.most_stages; ++stages) size.shared_bytes[stages] = S::SharedBytes(stages);
  size.launch_relative = LaunchFp32Relative<kHead, kRows>;
  return size;
}

template <int kHead>
constexpr Fp32Code MakeFp32RelativeCode() {
  Fp32Code code;
  code.planes = 2;
  code.sizes[0] = MakeFp32RelativeCtaSize<kHead, 64>();
  if constexpr (kHead > 192) code.sizes[2] = MakeFp32RelativeCtaSize<kHead, 32>();
  return code;
}
template <int kHead>
constexpr Fp32Code kFp32RelativeCode = MakeFp32RelativeCode<kHead>();

template <int kHead>
constexpr KernelEntry MakeFp32RelativeKernel() {
  KernelEntry kernel;
  kernel.name = "fp32";
  kernel.head_size = kHead;
  kernel.rows = kTileRows, kernel.keys = kTileKeys;
  kernel.code = &kFp32RelativeCode<kHead>;
  return kernel;
}
template <int kHead>
constexpr KernelEntry kFp32RelativeKernels[] = {MakeFp32RelativeKernel<kHead>()};

// With the error of fp32, else that of TF32.
template <int kHead>
KernelTable FindFp32(const KernelProblem& problem) {
  return problem.allows_tf32 ? kFp32Kernels<kHead, 1> : kFp32Kernels<kHead, 2>;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
