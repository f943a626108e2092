// SPDX-License-Identifier: Apache-2.0
#include "cuda/sparse_mlp/launch.cuh"

namespace stof {
namespace cuda {

const MlpKernels& MlpKernelsF32() { return mlp::KernelsOf<float>(); }

}  // namespace cuda
}  // namespace stof
