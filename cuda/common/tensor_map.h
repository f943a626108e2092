// SPDX-License-Identifier: Apache-2.0
// The driver's function that encodes a TMA map. It is found at run time: the library loads where there is no driver.
#ifndef STOF_CUDA_COMMON_TENSOR_MAP_H_
#define STOF_CUDA_COMMON_TENSOR_MAP_H_

#include <cudaTypedefs.h>
#include <cuda_runtime.h>

namespace stof {
namespace cuda {

// nullptr where the driver has none.
inline PFN_cuTensorMapEncodeTiled_v12000 FindTensorMapEncode() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = []() -> PFN_cuTensorMapEncodeTiled_v12000 {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encode;
}

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_TENSOR_MAP_H_
