// SPDX-License-Identifier: Apache-2.0
#include "cuda/sparse_mlp/launch.cuh"

namespace stof {
namespace cuda {

const MlpKernels& MlpKernelsBf16() { return mlp::KernelsOf<__nv_bfloat16>(); }

}  // namespace cuda
}  // namespace stof
