// SPDX-License-Identifier: Apache-2.0
// Launches of the kernel in attention_fp32.cuh, with as many stages as the device has shared memory for.
#ifndef STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/attention_fp32.cuh"
#include "cuda/attention_fp32_split.cuh"
#include "cuda/launch.cuh"

namespace stof {
namespace cuda {

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

template <int kHead>
Fp32Kernel MakeFp32Kernel(bool exact) {
  if (exact) return {kHead, 2, SplitFp32<kHead, 2>, LaunchFp32<kHead, 2>};
  return {kHead, 1, SplitFp32<kHead, 1>, LaunchFp32<kHead, 1>};
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
