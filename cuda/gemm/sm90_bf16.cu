// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90Bf16(bool pair, bool is_b_transposed) {
  return gemm90::FindKernels<__nv_bfloat16>(pair, is_b_transposed);
}

}  // namespace cuda
}  // namespace stof
