// SPDX-License-Identifier: Apache-2.0
// Launches of kernels whose one parameter is a struct.
#ifndef STOF_CUDA_COMMON_LAUNCH_CUH_
#define STOF_CUDA_COMMON_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace stof {
namespace cuda {

// Sets a kernel's dynamic shared memory, once a device, which also loads it. kKernel is a template parameter, so that
// each kernel has its own record of the devices.
template <typename Params, void (*kKernel)(const Params)>
int LoadKernel(int shared_bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each of the first 64 devices
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return static_cast<int>(error);
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if ((allowed.load(std::memory_order_relaxed) & bit) == 0) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return static_cast<int>(error);
    allowed.fetch_or(bit, std::memory_order_relaxed);
  }
  return 0;
}

// Whether programmatic dependent launch works for a kernel: the device's code must be compiled for compute
// capability 9.0 or later.
template <typename Params, void (*kKernel)(const Params)>
bool CanStartEarly() {
  static std::atomic<uint64_t> asked{0}, early{0};  // a bit for each of the first 64 devices
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= 64) return false;
  const uint64_t bit = uint64_t{1} << device;
  if ((asked.load(std::memory_order_acquire) & bit) == 0) {
    cudaFuncAttributes attributes = {};
    if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kKernel)) != cudaSuccess) {
      cudaGetLastError();  // not to be found by others
      return false;
    }
    if (attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90) early.fetch_or(bit, std::memory_order_relaxed);
    asked.fetch_or(bit, std::memory_order_release);
  }
  return (early.load(std::memory_order_relaxed) & bit) != 0;
}

// Launches a kernel and gives the error of this launch; <<<>>> gives the thread's last error, whoever caused it.
//
// early: programmatic dependent launch. The kernel may start before the previous one has ended, and waits for it before
// it touches memory.
template <typename Params, void (*kKernel)(const Params)>
int LaunchKernel(const Params& params, unsigned ctas, unsigned threads, int shared_bytes, void* stream,
                 bool early = false) {
  const int loaded = LoadKernel<Params, kKernel>(shared_bytes);
  if (loaded != 0) return loaded;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  void* arguments[] = {const_cast<Params*>(&params)};
  return static_cast<int>(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), arguments));
}

#ifdef __CUDACC__
// ---- programmatic dependent launch: compute capability 9.0 and later ----
// Lets the next kernel of the stream start if it was launched early.
__device__ __forceinline__ void LetNextStart() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernels have ended and their writes are visible.
__device__ __forceinline__ void WaitForPrevious() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_LAUNCH_CUH_
