// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

const GemmSm90Kernel* FindGemmSm90Bf16(bool pair) {
  return pair ? kGemmPairs<__nv_bfloat16> : kGemmSingles<__nv_bfloat16>;
}

}  // namespace cuda
}  // namespace stof
