// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/fp32/launch.cuh"

namespace stof {
namespace cuda {

KernelTable FindFp32RelativeD64(const KernelProblem&) { return kFp32RelativeKernels<64>; }

}  // namespace cuda
}  // namespace stof
