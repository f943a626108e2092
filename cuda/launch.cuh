// SPDX-License-Identifier: Apache-2.0
// Launches of kernels whose one parameter is a struct.
#ifndef STOF_CUDA_LAUNCH_CUH_
#define STOF_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace stof {
namespace cuda {

// Not <<<>>>, after which only the thread's last error can be asked for, whoever made it. The kernel is allowed its
// dynamic shared memory at its first launch on a device; kKernel is a template parameter, so that each has its own
// record of where that was.
template <typename Params, void (*kKernel)(const Params)>
int LaunchKernel(const Params& params, unsigned ctas, unsigned threads, int shared_bytes, void* stream) {
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
  void* arguments[] = {const_cast<Params*>(&params)};
  return static_cast<int>(cudaLaunchKernel(reinterpret_cast<const void*>(kKernel), dim3(ctas), dim3(threads), arguments,
                                           static_cast<size_t>(shared_bytes), static_cast<cudaStream_t>(stream)));
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_LAUNCH_CUH_
