// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90Bf16(bool pair, bool is_b_transposed) {
  if (is_b_transposed) {
    if (pair) return GemmKernelTable();
    return gemm90::kGemmTransposed<__nv_bfloat16>;
  }
  if (pair) return gemm90::kGemmPairs<__nv_bfloat16>;
  return gemm90::kGemmSingles<__nv_bfloat16>;
}

}  // namespace cuda
}  // namespace stof
