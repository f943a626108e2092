// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

GemmKernelTable FindGemmSm90F16(bool pair, bool is_b_transposed) {
  if (is_b_transposed) {
    if (pair) return GemmKernelTable();
    return gemm90::kGemmTransposed<__half>;
  }
  if (pair) return gemm90::kGemmPairs<__half>;
  return gemm90::kGemmSingles<__half>;
}

}  // namespace cuda
}  // namespace stof
