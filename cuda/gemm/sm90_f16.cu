// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90F16(bool pair, bool is_b_transposed) {
  return gemm90::FindKernels<__half>(pair, is_b_transposed);
}

}  // namespace cuda
}  // namespace stof
