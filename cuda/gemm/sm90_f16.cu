// SPDX-License-Identifier: Apache-2.0
#include "cuda/gemm/sm90_configs.cuh"

namespace stof {
namespace cuda {

const GemmSm90Kernel* FindGemmSm90F16(bool pair) { return pair ? kGemmPairs<__half> : kGemmSingles<__half>; }

}  // namespace cuda
}  // namespace stof
