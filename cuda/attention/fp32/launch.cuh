// SPDX-License-Identifier: Apache-2.0
// Launches of the kernel in cuda/attention/fp32/kernel.cuh, with as many stages as the device has shared memory for.
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

// What a kernel is launched with.
struct Fp32Arrangement {
  int stages = 0;
  int section = 1;  // heads whose keys and values fill half of the L2 cache
};

// As many CTAs a multiprocessor as its registers allow, with two stages where they fit, else with one; fewer where
// shared memory is short. False where it is too short for one.
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
  using S = Fp32Shape<kHead, kPlanes, kTile>;
  for (int ctas = std::max(S::kCtas, 2); ctas > 0; ctas /= 2) {
    for (int stages = 2; stages >= (ctas == 1 ? 0 : 1); --stages) {
      const int bytes = S::SharedBytes(stages);
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

// kNone where the device has too little shared memory for such tiles.
constexpr int kNone = -1;
template <int kHead, int kPlanes, int kTile>
int LaunchFp32Tiles(const Fp32Params& params, bool extras, void* stream) {
  Fp32Arrangement arrangement;
  bool fits = false;
  const cudaError_t error = Arrange<kHead, kPlanes, kTile>(params.attention, &fits, &arrangement);
  if (error != cudaSuccess) return static_cast<int>(error);
  if (!fits) return kNone;
  if constexpr (kTile <= 64) {
    if (extras) return LaunchFp32As<kHead, kPlanes, kTile, true>(params, arrangement, stream);
  }
  return LaunchFp32As<kHead, kPlanes, kTile, false>(params, arrangement, stream);
}

// Whether CTAs of 128 rows pay: enough of them for the device, whose rows have many tiles of keys each
// (docs/lab/cuda-experiments.md, "fp32"). STOF_CUDA_FP32_ROWS, read once, is for tests of both.
inline cudaError_t RowsAreLong(const AttentionParams& p, bool* are) {
  constexpr int kManyTiles = 24, kCtas = 2;  // of a multiprocessor
  static const int asked = [] {
    const char* text = std::getenv("STOF_CUDA_FP32_ROWS");
    return text == nullptr ? 0 : std::atoi(text);
  }();
  if (asked > 0) {
    *are = asked == 128;
    return cudaSuccess;
  }
  int device = 0, multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  const int64_t items = int64_t{p.B} * p.H * ((p.S + kTileRows - 1) / kTileRows);
  const int tiles = p.has_mask != 0 ? p.mask.mean_row : (p.T + kTileKeys - 1) / kTileKeys;
  *are = tiles >= kManyTiles && items >= int64_t{kCtas} * multiprocessors;
  return error;
}

template <int kHead, int kPlanes>
int LaunchFp32(const Fp32Params& params, bool extras, void* stream) {
  int code = kNone;
  if constexpr (kHead <= 64) {
    bool long_rows = false;
    const cudaError_t error = RowsAreLong(params.attention, &long_rows);
    if (error != cudaSuccess) return static_cast<int>(error);
    if (long_rows && !extras) code = LaunchFp32Tiles<kHead, kPlanes, 128>(params, extras, stream);
  }
  if (code == kNone) code = LaunchFp32Tiles<kHead, kPlanes, 64>(params, extras, stream);
  if constexpr (kHead > 192 && kPlanes == 2) {  // 99 KiB, as compute capability 8.6, 8.9 and 12.0 have
    if (code == kNone) code = LaunchFp32Tiles<kHead, kPlanes, 32>(params, extras, stream);
  }
  return code == kNone ? static_cast<int>(cudaErrorInvalidConfiguration) : code;
}

template <int kHead>
Fp32Kernel MakeFp32Kernel(bool exact) {
  if (exact) return {kHead, 2, SplitFp32<kHead, 2>, LaunchFp32<kHead, 2>};
  return {kHead, 1, SplitFp32<kHead, 1>, LaunchFp32<kHead, 1>};
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_ATTENTION_FP32_LAUNCH_CUH_
