// SPDX-License-Identifier: Apache-2.0
// Launches the fp32 kernel with as many stages as the shared memory of the device holds; its tables.
#ifndef STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
#define STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>

#include "cuda/attention/fp32/kernel.cuh"
#include "cuda/attention/fp32/split_operands.cuh"
#include "cuda/common/launch.cuh"

namespace stof {
namespace cuda {

// Launch configuration that depends on the device and the problem.
struct Fp32Config {
  int stages = 0;
  int l2_heads = 1;  // query heads of an L2 head group, whose keys and values fill half of L2
};

// As many CTAs an SM as the registers allow, with two stages if they fit, else one; fewer CTAs where shared memory is
// short. *fits is false where it is too small for one.
template <int kHead, int kPlanes, int kTile>
cudaError_t ChooseConfig(const AttentionParams& p, bool* fits, Fp32Config* config) {
  int device = 0, block = 0, whole = 0, cache = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&whole, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&cache, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  constexpr int kReserved = 1024;                            // of a CTA
  if (const int most = CappedShared(block); most < block) {  // set by a test
    block = most;
    whole = std::min(whole, block + kReserved);
  }
  const int64_t heads = int64_t{p.B} * p.H, head_bytes = int64_t{4} * kPlanes * kHead * p.T / (p.H / p.G) + 1;
  const int64_t l2_groups = 1 + (heads * head_bytes - 1) / std::max(cache / 2, 1);
  config->l2_heads = static_cast<int>((heads + l2_groups - 1) / l2_groups);
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  for (int ctas = std::max(S::kCtas, 2); ctas > 0; ctas /= 2) {
    for (int stages = 2; stages >= (ctas == 1 ? 0 : 1); --stages) {
      const int bytes = S::SharedBytes(stages);
      if (bytes > block || ctas * (bytes + kReserved) > whole) continue;
      config->stages = stages;
      *fits = true;
      return cudaSuccess;
    }
  }
  *fits = false;
  return cudaSuccess;
}

template <int kHead, int kPlanes, int kTile, bool kScoreMod>
int LaunchFp32Shape(const Fp32Params& params, const Fp32Config& config, void* stream) {
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  auto* kernel = Fp32AttentionKernel<kHead, kPlanes, kTile, kScoreMod>;
  const int bytes = S::SharedBytes(config.stages);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return static_cast<int>(error);
  const AttentionParams& p = params.attention;
  const int64_t items = static_cast<int64_t>(p.B) * p.H * ((p.S + kTileRows - 1) / kTileRows) * S::kCtasPerTile;
  Fp32Params copy = params;
  int stages = config.stages, l2_heads = config.l2_heads;
  void* arguments[] = {&copy, &stages, &l2_heads};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(items)),
                                           dim3(S::kThreads), arguments, static_cast<size_t>(bytes),
                                           static_cast<cudaStream_t>(stream)));
}

// Gives kTooLittleMemory where the device has too little shared memory for such tiles.
constexpr int kTooLittleMemory = -1;
template <int kHead, int kPlanes, int kTile>
int LaunchFp32Tiles(const Fp32Params& params, bool score_mod, void* stream) {
  Fp32Config config;
  bool fits = false;
  const cudaError_t error = ChooseConfig<kHead, kPlanes, kTile>(params.attention, &fits, &config);
  if (error != cudaSuccess) return static_cast<int>(error);
  if (!fits) return kTooLittleMemory;
  if constexpr (kTile <= 64) {
    if (score_mod) return LaunchFp32Shape<kHead, kPlanes, kTile, true>(params, config, stream);
  }
  return LaunchFp32Shape<kHead, kPlanes, kTile, false>(params, config, stream);
}

// Whether CTAs of 128 rows are faster: there are enough of them for the device, and tile rows have many KV tiles
// (docs/lab/cuda-experiments.md, "fp32"). STOF_CUDA_FP32_ROWS, read once, is for tests of both.
inline cudaError_t PrefersLargeCtas(const AttentionParams& p, bool* are) {
  constexpr int kManyTiles = 24, kCtas = 2;  // an SM
  static const int asked = [] {
    const char* text = std::getenv("STOF_CUDA_FP32_ROWS");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  if (asked > 0) {
    *are = asked == 128;
    return cudaSuccess;
  }
  int device = 0, sm_count = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device);
  }
  const int64_t items = int64_t{p.B} * p.H * ((p.S + kTileRows - 1) / kTileRows);
  const int tiles = p.has_mask != 0 ? p.mask.mean_row : (p.T + kTileKeys - 1) / kTileKeys;
  *are = tiles >= kManyTiles && items >= int64_t{kCtas} * sm_count;
  return error;
}

template <int kHead, int kPlanes>
int LaunchFp32(const Fp32Params& params, bool score_mod, void* stream) {
  int code = kTooLittleMemory;
  if constexpr (kHead <= 64) {
    bool long_rows = false;
    const cudaError_t error = PrefersLargeCtas(params.attention, &long_rows);
    if (error != cudaSuccess) return static_cast<int>(error);
    if (long_rows && !score_mod) code = LaunchFp32Tiles<kHead, kPlanes, 128>(params, score_mod, stream);
  }
  if (code == kTooLittleMemory) code = LaunchFp32Tiles<kHead, kPlanes, 64>(params, score_mod, stream);
  if constexpr (kHead > 192 && kPlanes == 2) {  // for 99 KiB: compute capability 8.6, 8.9 and 12.0
    if (code == kTooLittleMemory) code = LaunchFp32Tiles<kHead, kPlanes, 32>(params, score_mod, stream);
  }
  return code == kTooLittleMemory ? static_cast<int>(cudaErrorInvalidConfiguration) : code;
}

template <int kHead, int kPlanes>
constexpr Fp32Code MakeFp32Code() {
  Fp32Code code;
  code.planes = kPlanes;
  code.split = SplitFp32<kHead, kPlanes>;
  code.launch = LaunchFp32<kHead, kPlanes>;
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

// With the error of fp32, else that of TF32.
template <int kHead>
KernelTable FindFp32(const KernelProblem& problem) {
  return problem.allows_tf32 ? kFp32Kernels<kHead, 1> : kFp32Kernels<kHead, 2>;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
