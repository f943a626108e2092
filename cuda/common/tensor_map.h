// SPDX-License-Identifier: Apache-2.0
// The driver's function that encodes a TMA map. It is found at run time: the library loads where there is no driver.
#ifndef STOF_CUDA_COMMON_TENSOR_MAP_H_
#define STOF_CUDA_COMMON_TENSOR_MAP_H_

#include <cudaTypedefs.h>

namespace stof {
namespace cuda {

// nullptr where the driver has none.
PFN_cuTensorMapEncodeTiled_v12000 FindTensorMapEncode();

}  // namespace cuda
}  // namespace stof
#endif  // STOF_CUDA_COMMON_TENSOR_MAP_H_
