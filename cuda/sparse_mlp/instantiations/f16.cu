// SPDX-License-Identifier: Apache-2.0
#include "cuda/sparse_mlp/launch.cuh"

namespace stof {
namespace cuda {

const MlpKernels& MlpKernelsF16() { return mlp::KernelsOf<__half>(); }

}  // namespace cuda
}  // namespace stof
